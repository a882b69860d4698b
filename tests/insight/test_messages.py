"Every error and warning of the package, met as a user would: each says what, why, and what next."
import ast, sys, threading, traceback, warnings
from pathlib import Path

import pytest, torch
from fastai.optimizer import Lamb
from torch import nn

import fastxtend_amp
from fastxtend_amp import AMPMode, MixedPrecision, precision_support
from fastxtend_amp.tools import demo
from fastxtend_amp import kahan
from helpers import *

PACKAGE = Path(fastxtend_amp.__file__).parent


def net(): return learner(nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 1)))
def fit(learn): learn.fit(1)
def fp16_weights(): return learner(nn.Sequential(nn.Linear(6, 1).half()))


class Closure(torch.optim.SGD):
    def step(self, closure): return super().step(closure)


class InProjection(nn.Module):
    "Uses its layer's weight without calling the layer."
    def __init__(self): super().__init__(); self.inner = nn.Linear(6, 1)
    def forward(self, x): return nn.functional.linear(x, self.inner.weight)


class Sparse(nn.Module):
    def __init__(self): super().__init__(); self.emb = nn.Embedding(16, 1, sparse=True)
    def forward(self, x): return self.emb((x[:, 0].abs() * 8).long().clamp(max=15))


def wrapped(opt): return partial(OptimWrapper, opt=opt)
def in_a_batch(f): return lambda: net().to_bf16().add_cb(At('after_batch', f)).fit(1)
def flat(opt, model=None): return lambda: learner(model, opt_func=opt).to_half_weights(flat_master=True).fit(1)
def bad_state(tmp, change):
    learn = learner(path=tmp).to_fp16()
    learn.fit(1); learn.save('a')
    state = torch.load(tmp / 'models' / 'a.pth', weights_only=False)
    change(state['opt']['grad_scaler']); torch.save(state, tmp / 'models' / 'a.pth')
    learn.load('a')
def scale_for_nobody(tmp):
    learner(path=tmp).to_fp16().fit(1)
    learn = learner(path=tmp).to_fp16(); learn.fit(1); learn.save('a')
    learner(path=tmp).to_bf16().load('a')
def without(module, f):
    def run(monkeypatch):
        monkeypatch.setitem(sys.modules, module, None)
        f()
    return run
def faked(target, name, value, f):
    def run(monkeypatch):
        monkeypatch.setattr(target, name, value)
        f()
    return run
def twice(learn): learn.add_cb(learn.precision)
def two_callbacks():
    learn = net().to_fp16()
    learn.add_cb(MixedPrecision('bf16')).fit(1)
def holds_a_lock():
    cb = At('after_loss', print)
    cb.lock = threading.Lock()
    learner(cbs=cb).compare_precision(n_steps=1)
def empty():
    dls = loaders()
    dls.train.drop_last, dls.train.bs = True, 64
    return learner(dls=dls)
def no_targets():
    dls = loaders()
    dls.n_inp = 2
    learner(nn.Bilinear(6, 1, 1), dls).compare_precision('bf16', n_steps=1)
def lstm():
    class Net(nn.Module):
        def __init__(self): super().__init__(); self.rnn, self.head = nn.LSTM(1, 4, batch_first=True), nn.Linear(4, 1)
        def forward(self, x): return self.head(self.rnn(x[..., None])[0][:, -1])
    return learner(Net()).to_fp16()
def applied_to_nobody():
    r = net().compare_precision('bf16', n_steps=1, n_seeds=0)
    r._learn = None
    r.apply()
def on_another_rank(monkeypatch):
    watch = fastxtend_amp.insight.watch
    monkeypatch.setattr(watch, 'several_processes', lambda: True)
    monkeypatch.setattr(watch.dist, 'get_rank', lambda: 0)
    monkeypatch.setattr(watch.dist, 'all_reduce', lambda t, op: t.fill_(2.))
    fit(net().to_bf16(on_overflow='raise'))
def bf16_emulated(monkeypatch):
    monkeypatch.setattr(fastxtend_amp.mode, 'cpu_features', lambda: frozenset())
    net().to_bf16().fit(1)
def auto_nothing(monkeypatch):
    monkeypatch.setattr(fastxtend_amp.mode, 'cpu_features', lambda: frozenset())
    net().to_amp().fit(1)
def unsupported(monkeypatch):
    monkeypatch.setitem(fastxtend_amp.mode._RULES, 'cpu', lambda mode,
                        device: fastxtend_amp.mode.Support('unsupported', 'it is too old'))
    net().to_bf16().fit(1)
def no_autocast(monkeypatch):
    for name, module in list(sys.modules.items()):
        if name.startswith('fastxtend_amp.') and hasattr(module, 'autocast_available'):
            monkeypatch.setattr(module, 'autocast_available', lambda kind: False)
    net().to_bf16().fit(1)
def sharded(monkeypatch):
    monkeypatch.setattr(fastxtend_amp.insight.copies, 'is_dtensor', lambda p: True)
    net().precision_report()
def ddp_without_masters(tmp_path):
    torch.distributed.init_process_group('gloo', init_method=f'file://{tmp_path}/store', rank=0, world_size=1)
    try: fit(learner(nn.parallel.DistributedDataParallel(mlp())).to_half_weights(master_weights=False))
    finally: torch.distributed.destroy_process_group()
def sharded_half_weights(tmp_path):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    torch.distributed.init_process_group('gloo', init_method=f'file://{tmp_path}/store', rank=0, world_size=1)
    try: fit(learner(fully_shard(mlp(), mesh=init_device_mesh('cpu', (1,))), opt_func=OPTIMIZERS['adamw']).to_half_weights(master_weights=False))
    finally: torch.distributed.destroy_process_group()


# what happens: kind of error or warning, what it must name (the argument, its value, the thing), why, and what is
# allowed or to be done
VE, TE, RE = ValueError, TypeError, RuntimeError
CASES = {
    'unknown mode': (lambda: MixedPrecision('fp61'), VE, "amp_mode='fp61'", 'is not a precision', "Allowed: 'fp16'"),
    'fp32 as a mode': (lambda: AMPMode('fp32'), VE, "amp_mode='fp32'", 'is not a precision', '`learn.to_fp32()`'),
    'unknown device': (lambda: precision_support('gpu'), VE, "device='gpu'", 'is not a torch device', 'cpu'),
    'unknown attribute': (lambda: fastxtend_amp.mixed, AttributeError, "'mixed'", 'no attribute', 'fastxtend_amp'),
    'unknown argument': (lambda: net().to_bf16(init_scale=8.), TE, "to_bf16() has no argument 'init_scale'", 'there are', 'fp32_modules'),
    'scale of nan': (lambda: net().to_fp16(init_scale=float('nan')), VE, 'init_scale=nan', 'cannot be used',
                     'a finite number above 0'),
    'growth below 1': (lambda: net().to_fp16(growth_factor=.5), VE, 'growth_factor=0.5', 'cannot be used', 'above 1'),
    'a scaler that is none': (lambda: net().to_fp16(scaler=3), TE, 'scaler=3', 'cannot be used',
                              'torch.amp.GradScaler'),
    'a callback twice': (lambda: twice(net().to_bf16()), VE,
                         'on this learner already', 'would run twice', 'Leave it out'),
    'a precision for use_amp': (lambda: net().to_channelslast('bf16'), TypeError, "to_channelslast('bf16')", 'use_amp',
                                "amp_mode='bf16'"),
    'a precision without use_amp': (lambda: net().to_channelslast(False, 'bf16'), VE, 'to_channelslast(use_amp=False)',
                                    "'bf16', which sets a precision", "amp_mode='bf16'"),
    'model that does not run': (lambda: learner(nn.Linear(5, 1)).precision_report(), VE, 'does not run on its first batch',
                                'cannot be multiplied', 'precision_report(dl=...)'),
    'two ways to scale': (lambda: net().to_fp16(loss_scale=512., growth_factor=3.), VE, 'loss_scale',
                          'each decides the loss scale in its own way', 'Keep one'),
    'a scaler for bf16': (lambda: MixedPrecision('bf16', scaler=torch.amp.GradScaler('cpu')), VE, 'scaler=',
                          'needs no loss scaling', 'Leave it out'),
    'unknown on_overflow': (lambda: net().to_fp16(on_overflow='stop'), VE, "on_overflow='stop'", 'cannot be used',
                            "'warn', 'raise' or 'ignore'"),
    'max_skips of 0': (lambda: net().to_fp16(max_skips=0), VE, 'max_skips=0', 'skipped steps in a row', 'at least 1'),
    'no such module': (lambda: net().to_fp16(fp32_modules='3'), VE, "fp32_modules='3'", 'matches no module',
                       'Near names'),
    'modules of no kind': (lambda: net().to_fp16(fp32_modules=3), TE, 'fp32_modules=3', 'cannot be used',
                           "names with wildcards such as 'head.*'"),
    'TorchScript kept': (lambda: learner(nn.Sequential(torch.jit.script(nn.Linear(6, 1)))).to_fp16(fp32_modules='0'),
                         VE, "module '0'", 'cannot be replaced',
                         'Keep the module around it'),
    'kept and never called': (lambda: fit(learner(InProjection()).to_bf16(fp32_modules='inner')), UserWarning,
                              "'inner' was not called", 'does nothing',
                              "Keep '(model)' instead"),
    'to_amp with a mode': (lambda: net().to_amp('bf16'), TE, "to_amp('bf16')", 'chooses the precision itself',
                           'learn.to_bf16()'),
    'half parameters': (lambda: learner(nn.Sequential(nn.Linear(6, 1).bfloat16())).to_bf16().fit(1), UserWarning,
                        "2 parameters to be trained are in half precision themselves, such as '0.weight'",
                        'rounded away', '`learn.model.float()`'),
    'measure, not a switch': (lambda: net().to_amp(measure='yes'), TE, "to_amp(measure='yes')", 'True or False',
                              '`learn.to_bf16()`'),
    'seconds without measuring': (lambda: net().to_amp(max_seconds=9), VE, 'to_amp(max_seconds=9)', 'applies with measure=True only',
                                  '`to_amp(measure=True, max_seconds=...)`'),
    'measured, with arguments': (lambda: net().to_amp(measure=True, init_scale=8.), VE, 'to_amp(measure=True)',
                                 'init_scale', 'the call that it prints'),
    'removed in a batch': (lambda: net().to_fp16().add_cb(At('after_loss', lambda l: l.remove_cb(l.precision), 40)).fit(1),
                           RE, 'in the middle of a batch', 'take effect at its end', 'learn.to_fp32()'),
    'emulated': (bf16_emulated, UserWarning, "bf16 is emulated on device 'cpu'", 'has no bf16 arithmetic',
                 'The faster choice there is `learn.to_fp32()`'),
    'auto finds nothing': (auto_nothing, UserWarning, "amp_mode='auto'", 'neither bf16 nor fp16 natively',
                           '`precision_support()`'),
    'unsupported': (unsupported, VE, "bf16 mixed precision does not run on device 'cpu'", 'it is too old',
                    'What works there: '),
    'no autocast': (no_autocast, VE, "amp_mode='bf16' cannot be used on device 'cpu'", 'PyTorch has no autocast',
                    '`to_fp32()`'),
    'fp16 parameters': (lambda: fit(fp16_weights().to_fp16()), VE, "such as '0.weight'", 'needs fp32 parameters',
                        '`learn.model.float()`'),
    'two callbacks': (two_callbacks, VE, 'several precision callbacks', 'Keep one', '`learn.to_fp32()` removes'),
    'a closure': (lambda: fit(learner(opt_func=wrapped(Closure)).to_fp16()), VE, 'Closure needs a closure',
                  'GradScaler does not support', '`learn.to_bf16()`'),
    'a layer without kernel': (lambda: fit(lstm()), VE, "'rnn' (LSTM)", 'PyTorch says', 'fp32_modules=nn.LSTM'),
    'damaged file': (lambda tmp_path: bad_state(tmp_path, lambda s: s.update(scale='x')), VE, "'scale' is 'x'",
                     'Nothing was loaded', 'with_opt=False'),
    'damaged file, a key gone': (lambda tmp_path: bad_state(tmp_path, lambda s: s.pop('scale')), VE,
                                 "'scale' is missing", 'Nothing was loaded',
                                 'with_opt=False'),
    'a scale nobody uses': (scale_for_nobody, UserWarning, 'the loss scale of fp16 training',
                            'this learner does not use',
                            '`learn.to_fp16()` before `learn.load`'),
    'goes wrong': (lambda: fit(learner(Attentive()).to_fp16()), UserWarning, 'fp16 training goes wrong',
                   'fp16 ends at 65,504', "fp32_modules=['attn"),
    'goes wrong and stops': (lambda: fit(learner(Attentive()).to_fp16(on_overflow='raise')), FloatingPointError,
                             'fp16 training goes wrong', 'fp16 ends at',
                             "fp32_modules=['attn"),
    # reports
    'report without a mode': (lambda: net().precision_report(()), VE, 'modes=()', 'cannot be used',
                              "at least one of 'bf16' and 'fp16'"),
    'report on no batch': (lambda: net().precision_report(n_batches=0), VE, 'n_batches=0', 'cannot be used',
                           'at least 1'),
    'report without data': (lambda: empty().precision_report(), VE, 'at least one batch', 'gave none', 'dl='),
    'report on shards': (sharded, VE, 'precision_report', 'sharded', 'before `fully_shard`'),
    'report: seconds': (lambda: net().precision_report(max_seconds=0), VE, 'max_seconds=0', 'cannot be used',
                        'above 0'),
    'report: mode': (lambda: net().precision_report('fp61'), VE, "modes='fp61'", 'not a precision',
                     "'bf16' and 'fp16'"),
    'report: fp16 parameters': (lambda: fp16_weights().precision_report(), VE, "such as '0.weight'",
                                'needs fp32 parameters', '`learn.model.float()`'),
    'report: lazy modules': (lambda: learner(nn.Sequential(nn.LazyLinear(1))).precision_report(), VE, "'0.weight'",
                             'not built yet', 'one_batch()'),
    'report: a model that does not run': (lambda: learner(nn.Linear(3, 1)).precision_report(), VE,
                                          'does not run on its first batch', 'mat1 and mat2', '`precision_report(dl=...)`'),
    'goes wrong elsewhere': (on_another_rank, FloatingPointError, 'goes wrong on rank 1', 'Every rank stops',
                             'the message of rank 1'),
    'compare: steps': (lambda: net().compare_precision(n_steps=0), VE, 'n_steps=0', 'cannot be used', 'at least 1'),
    'compare: strangers': (lambda: net().compare_precision(cbs=[At('after_step', print)]), VE, 'cbs=[At]',
                           "not among the learner's",
                           'Pass some of `learn.cbs`'),
    'compare: steps for modes': (lambda: net().compare_precision(20), VE, 'modes=20', 'names the precisions',
                                 'n_steps=20?'),
    'compare: mode': (lambda: net().compare_precision('fp61'), VE, "modes='fp61'", 'not a precision', "'half weights'"),
    'compare: shards': (faked(fastxtend_amp.insight.copies, 'is_dtensor', lambda p: True,
                              lambda: net().compare_precision()), VE, 'compare_precision', 'sharded',
                        'before `fully_shard`'),
    'compare: apply': (lambda: net().compare_precision('bf16', n_steps=1, n_seeds=0).apply(mode='fp16'), VE,
                       "mode='fp16'", 'was not compared', "'fp32', 'bf16'"),
    'compare: apply to nobody': (applied_to_nobody, VE, 'apply()', 'cannot find the learner', 'learn='),
    'compare: in a fit': (in_a_batch(lambda l: l.compare_precision(n_steps=1)), RE, 'compare_precision',
                          'inside a fit', 'before or after'),
    'compare: no data': (lambda: empty().compare_precision(n_steps=1), VE, '`learn.dls.train`', 'gives no batches',
                         '`drop_last=True`'),
    'compare: what cannot be copied': (holds_a_lock, VE, "'lock' of the callback 'at' refuses", 'cannot pickle',
                                       'removed_cbs'),
    'compare: no targets': (no_targets, VE, 'no targets', 'no loss to compare', '`learn.dls.n_inp`'),
    # half-precision weights
    'half: dtype': (lambda: net().to_half_weights('fp8'), VE, "dtype='fp8'", 'cannot be used', "'bf16' or 'fp16'"),
    'half: scale for bf16': (lambda: net().to_half_weights(loss_scale=512.), VE, 'loss_scale=512.0',
                             'needs no loss scaling', "dtype='fp16'"),
    'half: flat without masters': (lambda: net().to_half_weights(master_weights=False, flat_master=True), VE,
                                   'flat_master=True', 'no master to make flat',
                                   'Leave one'),
    'half: fp16 without masters': (lambda: net().to_half_weights('fp16', master_weights=False), VE,
                                   'master_weights=False', 'must be unscaled in fp32', "dtype='bf16'"),
    'half: per tensor': (flat(Lamb), VE, 'flat_master=True cannot be used with Lamb', 'own element-wise optimizers',
                         'Leave flat_master out'),
    'half: DDP without masters': (ddp_without_masters, VE, 'master_weights=False',
                                  'DistributedDataParallel, which reduces', '`learn.to_bf16()`'),
    'half: FSDP2': (sharded_half_weights, VE, 'with FSDP2', 'the dtype that the weights had', '`learn.to_bf16()`'),
    'half: nothing compensates': (lambda: fit(learner(opt_func=SGD).to_half_weights(master_weights=False)),
                                  VE, 'master_weights=False cannot be used with Sgd', 'does not compensate for rounding',
                                  'kahan'),
    'kahan: no optimi': (without('optimi', kahan), ImportError, 'kahan', 'needs optimi', 'pip install'),
    'kahan: no such optimizer': (lambda: kahan('Adamw'), VE, "opt='Adamw'", "not one of optimi's", 'AdamW'),
    # console scripts
    'demo: epochs': (lambda: demo.main(['--epochs', '0']), SystemExit, '--epochs 0', 'error', 'at least 1'),
    'demo: folder': (lambda: demo.main(['--out', 'nowhere/demo.png']), SystemExit, '--out nowhere', 'error',
                     'no folder nowhere'),
    'demo: device': (lambda: demo.main(['--device', 'gpu']), SystemExit, '--device gpu', 'error', 'cpu'),
    'demo: no autocast': (lambda: demo.main(['--device', 'meta']), SystemExit, '--device meta', 'no autocast',
                          'try cpu'),
    # XLA: the others need an XLA device, and are read in test_xla.py
}


def met(case, kind, capsys, monkeypatch, **fixtures):
    "What a user reads, and where in the package it comes from; a warning points at the user's own line."
    wanted = {n: o for n, o in (('monkeypatch', monkeypatch),
                                *fixtures.items()) if n in case.__code__.co_varnames[:case.__code__.co_argcount]}
    if case is scale_for_nobody: wanted = {'tmp': fixtures['tmp_path']}
    said, warn = [], warnings.warn
    def noted(message, category=UserWarning, *args, **kwargs):
        frame = sys._getframe(1)
        if PACKAGE in Path(frame.f_code.co_filename).parents and issubclass(category or UserWarning, kind):
            said.append((str(message), (Path(frame.f_code.co_filename).name, frame.f_lineno)))
        warn(message, category, *args, **kwargs)
    monkeypatch.setattr(warnings, 'warn', noted)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        try: case(**wanted)
        except kind as e:
            frames = [f for f in traceback.extract_tb(e.__traceback__) if PACKAGE in Path(f.filename).parents]
            return str(e) if kind is not SystemExit else capsys.readouterr().err, (Path(frames[-1].filename).name,
                                                                                   frames[-1].lineno)
    return '\n'.join(text for text, _ in said), *(place for _, place in said)


SEEN = {}  # case: the places it came from


@pytest.mark.parametrize('name', CASES)
def test_says_what_why_and_what_next(name, capsys, tmp_path, monkeypatch):
    case, kind, what, why, what_next = CASES[name]
    text, *SEEN[name] = met(case, kind, capsys, tmp_path=tmp_path, monkeypatch=monkeypatch)
    assert text, 'nothing was said'
    for part in (what, why, what_next): assert part in text, text
    assert '\n\n' not in text and text.strip()[-1] in '.?' or kind in (SystemExit, AttributeError), text


def places():
    "Where the package raises an error of Python's or warns: file, first and last line."
    builtin = {'ValueError', 'TypeError', 'RuntimeError', 'FloatingPointError', 'ImportError', 'AttributeError'}
    for file in sorted(PACKAGE.rglob('*.py')):
        for node in ast.walk(ast.parse(file.read_text())):
            raises = isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and getattr(node.exc.func, 'id',
                                                                                                '') in builtin
            call = node.value if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) else None
            says = call is not None and ast.unparse(call.func) in ('warnings.warn', 'parser.error')
            if raises or says: yield file.name, node.lineno, node.end_lineno


# Met in test_xla.py, tests/tools, tests/half_weights/test_refusals.py, test_compat.py, test_docs.py, devices/accelerator and test_optimizers.py.
ELSEWHERE = {'xla.py', 'compat.py', 'refused_names.py', 'checks.py', 'optimizers.py', 'check.py',
             'memory.py'}


def test_no_message_is_left_out():
    if set(SEEN) != set(CASES): pytest.skip('the other tests of this file have to run before')
    seen = {place for found in SEEN.values() for place in found}
    left = [p for p in places() if p[0] not in ELSEWHERE and not any(f == p[0] and p[1] <= line <= p[2] for f,
                                                                     line in seen)]
    assert not left, left
