"""Change one line of the package, and see whether a test fails: `python tests/mutations.py [WORD...]`.

A row of MUTATIONS is a line that matters and a wrong one in its place. The command copies the checkout, applies one
row, runs the tests that cover it until one fails, and prints a table. A mutation that survives means that a test is
missing, or that the line is useless. First all of these tests run without a change: they must pass.
"""

import os, shutil, subprocess, sys, tempfile, time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]


class Mutation(NamedTuple):
    why: str  # what a user would meet
    file: str  # in the package
    line: str  # text that the file has once
    change: str
    tests: str  # the files that cover it, the likeliest first


FILES = [*(ROOT / 'tests').rglob('test_*.py')]
MUTATIONS = [
    Mutation(*row)
    for row in [
        (
            'a step that another callback cancelled changes the scale',
            'training/callback.py',
            'scaling.found_inf is not True: scaling.cancel()',
            'False: pass',
            'scale skips nothing_left',
        ),
        (
            'a callback that is removed in a fit stays open',
            'training/callback.py',
            '            self.close()\n',
            '            pass\n',
            'switches nothing_left half_weights',
        ),
        (
            'a callback is removed in a batch, and autocast stays on',
            'training/callback.py',
            '            if self.in_batch:\n',
            '            if False:\n',
            'switches',
        ),
        (
            '`learn.scaler` of an earlier fit scales a loss',
            'training/fit.py',
            "vars(self.learn).pop('scaler', None)",
            'pass',
            'nothing_left switches',
        ),
        (
            '`learn.scaler` is missing in bf16',
            'training/fit.py',
            "scaler or GradScaler('cpu', enabled=False)",
            'scaler',
            'equality',
        ),
        (
            'a copy made in a fit has that fit',
            'training/callback.py',
            "{**vars(self), 'fit': None, 'scopes': (), 'waiting': None}",
            'vars(self)',
            'nothing_left half_weights',
        ),
        (
            '`after_cancel_batch` runs under autocast',
            'training/callback.py',
            'after_cancel_batch = after_batch',
            'after_cancel_batch = noop',
            'nothing_left',
        ),
        (
            'backward and optimizer run under autocast',
            'training/callback.py',
            'self.scopes[-1][1].close()\n        for',
            'for',
            'autocast',
        ),
        (
            'the recorded loss is 16-bit',
            'training/callback.py',
            'if torch.is_tensor(loss) and is_half(loss)',
            'if False',
            'autocast',
        ),
        (
            'predictions reach the loss in 16 bits',
            'training/callback.py',
            'if self.fit.precision.dtype: self.learn.pred',
            'if False: self.learn.pred',
            'autocast',
        ),
        (
            'weights are cast in each batch of a validation',
            'training/callback.py',
            'self.scopes[-1][1].enter_context(same)',
            'pass',
            'autocast',
        ),
        (
            'a validation inside a fit ends the fit',
            'training/callback.py',
            'if len(self.scopes) > 1 or self.in_batch: return',
            'if self.in_batch: return',
            'skips',
        ),
        ('`on_overflow="ignore"` warns', 'training/callback.py', "self.on_overflow == 'ignore' or ", '', 'skips'),
        (
            'two precision callbacks enter autocast twice',
            'training/callback.py',
            'for cb in self.learn.cbs) > 1',
            'for cb in self.learn.cbs) > 9',
            'switches',
        ),
        ('two learners share a loss scale', 'training/callback.py', 'if self.precision.in_use', 'if False', 'switches'),
        (
            'a state is loaded between unscaling and update',
            'training/callback.py',
            'if self.in_batch: raise',
            'if False: raise',
            'switches',
        ),
        (
            'a fit goes on with the scaler of before the load',
            'training/callback.py',
            'self.close()                                             # a fit',
            'pass  # a fit',
            'equality scale',
        ),
        (
            'a step that the device skips is cancelled by the host',
            'training/callback.py',
            'if scaling.found_inf is True: raise',
            'if scaling.found_inf: raise',
            'skips',
        ),
        (
            'a callback added in a batch starts in its middle',
            'training/callback.py',
            'self.learn is None or is_late',
            'self.learn is None',
            'switches',
        ),
        (
            'a switch in mid-batch happens at once',
            'training/callback.py',
            'if not self.in_batch: self.do_waiting()',
            'self.do_waiting()',
            'switches',
        ),
        (
            '16-bit parameters are trained',
            'training/fit.py',
            'self.precision.prepare(self.learn)\n',
            'pass\n',
            'autocast',
        ),
        (
            'modules that a threaded replica shares compute wrong',
            'training/fit.py',
            ' or precision.kept_in_fp32(model)',
            '',
            'autocast',
        ),
        (
            'DataParallel computes bf16 in fp16',
            'training/fit.py',
            'precision.dtype is not torch.float16 or ',
            '',
            'autocast',
        ),
        (
            'a fit in fp32 that failed leaves the precision set in it open',
            'training/loop.py',
            'if now := precision_callback(self):',
            'if cb and (now := precision_callback(self)):',
            'switches',
        ),
        (
            'gradients of a failed batch enter the next step',
            'training/loop.py',
            'now.close(failed=True)',
            'now.close()',
            'nothing_left switches',
        ),
        (
            'a switch before an exception is forgotten',
            'training/loop.py',
            '            now.do_waiting()',
            '            pass',
            'switches',
        ),
        (
            'a switch in mid-batch is forgotten',
            'training/loop.py',
            'cb.waiting and not cb.in_batch: cb.do_waiting()',
            'False: pass',
            'switches',
        ),
        (
            'an interrupt while autocast is entered leaves it on',
            'training/loop.py',
            'with autocast_restored(device_type) if autocast_available(device_type) else nullcontext()',
            'with nullcontext()',
            'nothing_left',
        ),
        (
            'the precision does not see the step',
            'training/loop.py',
            "if cb and event_type == 'step' and cb.fit",
            'if False',
            'half_weights',
        ),
        (
            'the fit of a loop over one_batch goes on in `fit`',
            'training/loop.py',
            'if not is_batch: cb.close()',
            'pass',
            'scale switches equality autocast nothing_left',
        ),
        (
            'a fit stays open after its end',
            'training/loop.py',
            'if not is_batch and (now := precision_callback(learn)): now.close()',
            'pass',
            'switches nothing_left equality',
        ),
        (
            'a part that has ended counts as open',
            'training/loop.py',
            'del scopes[depth:]',
            'pass',
            'nothing_left switches',
        ),
        (
            'a precision set in a fit does not know its scopes',
            'training/loop.py',
            'old.scopes if old else ()',
            '()',
            'switches',
        ),
        (
            'a precision that does not fit replaces the one before',
            'training/loop.py',
            'if cb is not None: cb.precision.check(learn.model)',
            'pass',
            'arguments fp8',
        ),
        (
            "fastai's own callback stays beside ours",
            'training/loop.py',
            'isinstance(c, _PRECISIONS)',
            'isinstance(c, MixedPrecision)',
            'switches',
        ),
        (
            "fastai's own callback runs without a word",
            'training/loop.py',
            "elif event_type == 'fit' and any(",
            'elif False and any(',
            'arguments',
        ),
        (
            'a step that an exception left open fails the next',
            'training/scaling.py',
            'self.cancel()                                            # what an exception left',
            'pass',
            'nothing_left scale equality',
        ),
        (
            'a step with gradients of the user is skipped after a skip',
            'training/scaling.py',
            'self.found_inf = False\n        params',
            'params',
            'skips',
        ),
        (
            '`skipped` is about an earlier step',
            'training/scaling.py',
            '            self.found_inf = False\n            return',
            '            return',
            'skips',
        ),
        (
            'gradients that are kept count less than new ones',
            'training/scaling.py',
            'torch._foreach_mul_(alike, scale.to(device))',
            'pass',
            'equality',
        ),
        (
            'a loss of the user is added to unscaled gradients',
            'training/scaling.py',
            '        self.start()\n',
            '',
            'equality',
        ),
        (
            'gradients stay scaled after the fit',
            'training/scaling.py',
            'or self.is_open:\n            self.unscale()',
            'or self.is_open:\n            pass',
            'equality nothing_left',
        ),
        (
            'an accumulation keeps gradients that are not finite',
            'training/scaling.py',
            '(failed or self.found_inf)',
            'failed',
            'equality',
        ),
        (
            'gradients of a failed batch enter the next step (scaling)',
            'training/scaling.py',
            '(failed or self.found_inf)',
            'self.found_inf',
            'nothing_left switches',
        ),
        (
            'buffers of a failed batch are not repaired',
            'training/scaling.py',
            '                self.repair_buffers(True)\n',
            '',
            'skips',
        ),
        (
            'a scale that has fallen to 0 on the device lets NaN pass',
            'training/scaling.py',
            'self.scaler._scale.clamp_(min=_LOWEST / 2)',
            'pass',
            'simulated',
        ),
        (
            'finite statistics of a skipped batch are lost',
            'training/scaling.py',
            'keep = now.isfinite()',
            'keep = torch.zeros_like(now, dtype=torch.bool)',
            'skips',
        ),
        ('masks are copied in each step', 'training/scaling.py', ' and b.numel() <= _LARGE', '', 'skips'),
        (
            'statistics are restored to those of the first batch',
            'training/scaling.py',
            'self.good[kind] = shapes, now',
            'self.good[kind] = before',
            'skips',
        ),
        (
            'buffers of an exchanged model are repaired with those of the old one',
            'training/scaling.py',
            ' and before[0] == shapes',
            '',
            'skips',
        ),
        ('a warning about half of the steps', 'training/scaling.py', '2 * skipped <= n', '2 * skipped < n', 'skips'),
        (
            'skips of the device are noticed an epoch later',
            'training/callback.py',
            'if scaling := self._scaling: scaling.read()',
            'pass',
            'accelerator simulated',
        ),
        (
            '`lr_find` warns of its skipped steps',
            'training/scaling.py',
            ' or self.before_lr_find is not None: return',
            ': return',
            'scale',
        ),
        (
            'a good step sets a scale that is twice as high',
            'training/scaling.py',
            '_ROOM = 65504 / 16',
            '_ROOM = 65504 / 8',
            'scale',
        ),
        (
            'a scale below the smallest number stays',
            'training/scaling.py',
            '_LOWEST = 2.**-24',
            '_LOWEST = 2.**-40',
            'scale',
        ),
        ('a scale without room', 'training/scaling.py', 'math.floor(', 'math.ceil(', 'scale'),
        (
            'a low init_scale costs a look at each gradient',
            'training/scaling.py',
            'scale < min(1, self.first_scale)',
            'scale < 1',
            'metrics scale',
        ),
        (
            'a scale of 1 is changed',
            'training/scaling.py',
            'scale < min(1, self.first_scale)',
            'scale <= min(1, self.first_scale)',
            'scale',
        ),
        ('a skipped step sets the scale', 'training/scaling.py', 'elif not self.found_inf:', 'else:', 'scale'),
        (
            'a good step lowers a scale',
            'training/scaling.py',
            'max(scale, min(self.first_scale, fits))',
            'min(self.first_scale, fits)',
            'scale',
        ),
        (
            'a good step sets a scale above init_scale',
            'training/scaling.py',
            'max(scale, min(self.first_scale, fits))',
            'max(scale, fits)',
            'scale',
        ),
        ('a warning at each step', 'training/scaling.py', 'if self.has_warned: return', 'pass', 'scale'),
        (
            'scales of `lr_find` are in the history',
            'training/scaling.py',
            'del self.history[self.first_step:]',
            'pass',
            'scale',
        ),
        (
            'training starts at the scale of `lr_find`',
            'training/scaling.py',
            'self.scaler.load_state_dict(self.before_lr_find)',
            'pass',
            'scale',
        ),
        (
            'fp32 training after a skip steps nowhere',
            'training/scaling.py',
            "for name in ('grad_scale', 'found_inf'): vars(self.opt).pop(name, None)",
            'pass',
            'nothing_left skips',
        ),
        (
            'a skipped first step leaves a state',
            'training/scaling.py',
            'all(map(opt.state.get, params))',
            'True',
            'skips',
        ),
        (
            'plain fused SGD synchronizes',
            'training/scaling.py',
            "all(group.get('momentum') == 0 for group in opt.param_groups)",
            'False',
            'skips',
        ),
        (
            "a subclass's own step is skipped on the device",
            'training/scaling.py',
            'type(opt) not in FUSED.values() or not',
            'not',
            'skips',
        ),
        (
            'predictions with the weights of an earlier batch',
            'training/fit.py',
            'if casts is None or casts != self.casts: torch.clear_autocast_cache()',
            'pass',
            'autocast',
        ),
        (
            'predictions with weights that a callback has changed',
            'training/fit.py',
            'sum(p._version for p in counted)',
            '0',
            'autocast',
        ),
        (
            'casts are kept where gradients are on',
            'training/fit.py',
            'self.model is not None and not torch.is_grad_enabled()',
            'self.model is not None',
            'autocast',
        ),
        (
            'an exchanged model keeps our forward',
            'training/fit.py',
            '        self.around_model.close()\n',
            '',
            'fp32_modules autocast',
        ),
        (
            'a precision runs on a device that does not support it',
            'training/fit.py',
            'precision.check_device(device)',
            'pass',
            'devices tf32',
        ),
        (
            'slow emulation without a word',
            'training/fit.py',
            "if support.status != 'emulated': return",
            'return',
            'devices fp8',
        ),
        (
            'a link is replaced by a file',
            'training/checkpoint.py',
            'part.replace(path.resolve())',
            'part.replace(path)',
            'checkpoint',
        ),
        (
            'an exception while saving leaves a part',
            'training/checkpoint.py',
            'stack.callback(part.unlink, missing_ok=True)',
            'pass',
            'checkpoint',
        ),
        ('a file has no loss scale', 'training/checkpoint.py', 'if opt and state', 'if False', 'checkpoint'),
        (
            'a file is loaded in the middle of a batch',
            'training/checkpoint.py',
            'if cb.in_batch: raise RuntimeError(',
            'if False: raise RuntimeError(',
            'switches',
        ),
        (
            'bf16 rounding is added to weights from a file',
            'training/checkpoint.py',
            '    cb.close() ',
            '    pass ',
            'half_weights checkpoint',
        ),
        (
            'TextLearner loads the scale without the optimizer',
            'training/checkpoint.py',
            "if kwargs.get('with_opt') is False: return",
            'pass',
            'checkpoint',
        ),
        (
            'an export needs this package for its metrics',
            'training/checkpoint.py',
            'self.metrics = self.metrics.filter(_is_ours, negate=True)',
            'pass',
            'checkpoint',
        ),
        (
            'an export needs this package for its callbacks',
            'training/checkpoint.py',
            'self.cbs = self.cbs.filter(_is_ours, negate=True)',
            'pass',
            'checkpoint',
        ),
        (
            'an export needs this package for an attribute',
            'training/checkpoint.py',
            'if _is_ours(value): del vars(self)[name]',
            'pass',
            'checkpoint',
        ),
        (
            'an export in a fit writes our forwards',
            'training/checkpoint.py',
            'if cb is not None and not cb.in_batch: cb.close()',
            'pass',
            'checkpoint',
        ),
        (
            'precision_as leaves the other precision',
            'training/learner.py',
            'finally: exchange(self, before)',
            'finally: pass',
            'switches',
        ),
        (
            'precision_as waits for the end of a batch',
            'training/learner.py',
            'if before is not None and before.in_batch: raise',
            'if False: raise',
            'switches',
        ),
        (
            'amp_context computes all modules in 16 bits',
            'training/learner.py',
            'precision.around_fit(self.model) if not cb or cb.fit is None else []',
            '[]',
            'fp32_modules fp8',
        ),
        (
            'amp_context in a fit replaces forwards again',
            'training/learner.py',
            'precision.around_fit(self.model) if not cb or cb.fit is None else []',
            'precision.around_fit(self.model)',
            'compile',
        ),
        (
            "to_amp does not accept fp16's arguments in bf16",
            'precisions/base.py',
            'if name not in others}',
            '}',
            'switches arguments',
        ),
        (
            "to_channelslast adds fastai's callback",
            'training/learner.py',
            'channelslast.MixedPrecision = MixedPrecision',
            'pass',
            'switches',
        ),
        (
            'a parameter in two groups is unscaled twice',
            'common.py',
            '[*dict.fromkeys(chain.from_iterable(opt.param_lists))]',
            '[*chain.from_iterable(opt.param_lists)]',
            'equality',
        ),
        ('a name is unknown', 'precisions/base.py', "'half': 'fp16', ", '', 'devices'),
        ('a name in capitals is unknown', 'precisions/base.py', '.lower().removeprefix', '.removeprefix', 'devices'),
        ('a dtype is unknown', 'precisions/base.py', ".removeprefix('torch.')", '', 'devices'),
        (
            'to_amp selects what has failed',
            'precisions/base.py',
            'if cls.automatic and name not in [*failed]',
            'if cls.automatic',
            'facts',
        ),
        ('a fixed scale backs off', 'precisions/base.py', 'scaler.set_backoff_factor(1.)', 'pass', 'skips'),
        ('a fixed scale grows', 'precisions/base.py', 'scaler.set_growth_factor(1.)', 'pass', 'scale skips'),
        ('bf16 counts as emulated on an A100', 'precisions/bf16.py', 'if major >= 8', 'if major > 8', 'facts'),
        (
            'skip_nonfinite does nothing',
            'precisions/bf16.py',
            'if self.skip_nonfinite else None',
            'if False else None',
            'equality skips',
        ),
        (
            'fp16 counts as native on cards at 1/64 of the rate',
            'precisions/fp16.py',
            'capability == (6, 1)',
            'capability == (6, 2)',
            'facts',
        ),
        (
            'fp16 counts as native where it gives NaN',
            'precisions/fp16.py',
            'if capability == (7, 5) and',
            'if False and',
            'facts',
        ),
        (
            'fp16 counts as native without arithmetic',
            'precisions/fp16.py',
            'capability < (5, 3)',
            'capability < (5, 2)',
            'facts',
        ),
        (
            'fp16 counts as native without float64',
            'precisions/fp16.py',
            "if facts.xpu_capability(device).get('has_fp64', True)",
            'if True',
            'facts',
        ),
        ('a fixed scale is loaded', 'precisions/fp16.py', ' or self.is_fixed: return', ': return', 'scale checkpoint'),
        (
            'a scale of NaN is loaded',
            'precisions/fp16.py',
            "if not 0 <= state['scale'] < math.inf",
            'if False',
            'scale',
        ),
        ('TF32 counts as native on a T4', 'precisions/tf32.py', 'if major < 8', 'if major < 7', 'facts'),
        ('FP8 counts as native on an A100', 'precisions/fp8.py', '(8, 9): return', '(8, 0): return', 'facts'),
        ('modules in fp32 compute in FP8', 'precisions/fp8.py', 'and not covers(in_fp32, name) and', 'and', 'fp8'),
        (
            'a layer computes in FP8 outside of a fit',
            'precisions/fp8.py',
            'self.active and not self.before',
            'not self.before',
            'fp8',
        ),
        (
            'a copy keeps its modules in fp32',
            'precisions/fp32_modules.py',
            'if not self.active: return',
            'if False: return',
            'fp32_modules',
        ),
        (
            'a copy made in a fit keeps its modules in fp32',
            'precisions/fp32_modules.py',
            "{**vars(self), 'active': False}",
            'vars(self)',
            'fp32_modules',
        ),
        (
            'modules in fp32 get 16-bit inputs',
            'precisions/fp32_modules.py',
            'args, kwargs = map_tensors(half_to_float, (args, kwargs))',
            'pass',
            'fp32_modules',
        ),
        (
            'modules in fp32 compute in 16 bits',
            'precisions/fp32_modules.py',
            'enabled=False)',
            'enabled=True)',
            'fp32_modules',
        ),
        (
            'a wrapped forward is removed',
            'precisions/fp32_modules.py',
            'if forward_of(forward.module) is not forward: continue',
            'pass',
            'fp32_modules',
        ),
        (
            'a forward on the instance is lost',
            'precisions/fp32_modules.py',
            'attributes.update(forward.before)',
            'pass',
            'fp32_modules',
        ),
        (
            'a wrapped forward computes in fp32 after the fit',
            'precisions/fp32_modules.py',
            'forward.active, attributes = False, vars',
            'attributes = vars',
            'fp32_modules',
        ),
        ("TorchScript's forward is lost", 'precisions/fp32_modules.py', '_ = module.forward ', 'pass ', 'fp32_modules'),
        (
            'a module inside one in fp32 is not covered',
            'precisions/matching.py',
            'ROOT in names or ',
            '',
            'fp32_modules half_weights equality',
        ),
        (
            'compiled modules are found twice',
            'precisions/matching.py',
            'if name.endswith(COMPILED_NAME): continue',
            'pass',
            'fp32_modules compile half_weights',
        ),
        (
            'a list, which has no forward, is kept in fp32',
            'precisions/matching.py',
            'not isinstance(m, (nn.ModuleList, nn.ModuleDict))',
            'True',
            'fp32_modules',
        ),
        (
            'a module inside another is replaced twice',
            'precisions/matching.py',
            ' and not covers(matched, name)',
            '',
            'fp32_modules',
        ),
        (
            'a module in two places has one name',
            'precisions/matching.py',
            'named_modules(remove_duplicate=False)',
            'named_modules()',
            'fp32_modules',
        ),
        (
            'frozen weights become fp32',
            'precisions/weights.py',
            'if p.requires_grad and is_half(p)',
            'if is_half(p)',
            'autocast',
        ),
        (
            'gradients stay 16-bit',
            'precisions/weights.py',
            'if p.grad is not None: p.grad = p.grad.float()',
            'pass',
            'autocast',
        ),
        (
            'the state of the optimizer stays 16-bit',
            'precisions/weights.py',
            'if opt and p in opt.state',
            'if False',
            'autocast',
        ),
        (
            "the state of torch's optimizer stays 16-bit",
            'precisions/weights.py',
            "while hasattr(opt, 'opt'): opt = opt.opt",
            'pass',
            'autocast',
        ),
        ('statistics stay 16-bit', 'precisions/weights.py', 'b.data = half_to_float(b.data)', 'pass', 'autocast'),
        (
            'training without masters converts to fp32',
            'precisions/half_weights.py',
            'if self.master_weights: super().prepare(learn)',
            'super().prepare(learn)',
            'half_weights',
        ),
        (
            'frozen weights are rounded',
            'precisions/half_weights.py',
            'if p in allowed and p.requires_grad',
            'if p in allowed',
            'half_weights',
        ),
        (
            'a weight of an embedding is rounded',
            'precisions/half_weights.py',
            'and uses[p] == 1 and',
            'and',
            'half_weights',
        ),
        (
            'what a weight is computed from is rounded',
            'precisions/half_weights.py',
            "if name in ('weight', 'bias') ",
            'if True ',
            'half_weights',
        ),
        (
            'the rest of the first rounding is dropped',
            'precisions/half_weights.py',
            "if 'kahan_comp' in state: state['kahan_comp'].add_(rest)",
            'pass',
            'half_weights',
        ),
        (
            'the rest of a rounding is dropped',
            'precisions/half_weights.py',
            'rest = (exact - data) + rest',
            'rest = 0 * rest',
            'half_weights',
        ),
        (
            'weights are rounded twice',
            'precisions/half_weights.py',
            'rest - (exact - before)',
            '0 * rest',
            'half_weights',
        ),
        (
            'gradients keep their dtype',
            'precisions/half_weights.py',
            'if p.grad is not None: p.grad = p.grad.to(dtype)',
            'pass',
            'half_weights equality',
        ),
        (
            'weights stay bf16',
            'precisions/half_weights.py',
            'for p in self.rest: self._convert(p, torch.float32)',
            'pass',
            'half_weights',
        ),
        ('a copy made in a fit stays bf16', 'precisions/half_weights.py', 'new.__exit__()', 'pass', 'half_weights'),
        (
            'counts of steps are rounded',
            'precisions/half_weights.py',
            'type(v) is torch.Tensor and v.dim() and',
            'type(v) is torch.Tensor and',
            'half_weights',
        ),
        (
            'an exchanged optimizer keeps bf16 state',
            'precisions/half_weights.py',
            'self.opt = opt                                           # which',
            'pass #',
            'half_weights',
        ),
        (
            'flat lists stay after the step',
            'precisions/half_weights.py',
            'opt.param_lists, opt.state = lists, states\n',
            'pass\n',
            'half_weights',
        ),
        (
            'parameters share memory after the fit',
            'precisions/half_weights.py',
            'p.data = p.data.clone()',
            'pass',
            'half_weights',
        ),
        (
            'flat weights in another order are stepped wrong',
            'precisions/half_weights.py',
            'offset for t, offset in zip(tensors, offsets)',
            'offset for t, offset in ()',
            'half_weights',
        ),
        (
            'an exchanged optimizer steps on flat weights',
            'precisions/half_weights.py',
            'if self.flat_master: _check_elementwise(learn.opt)',
            'pass',
            'half_weights',
        ),
        (
            'an optimizer without summation loses updates',
            'precisions/half_weights.py',
            '_check_no_masters(learn.model, learn.opt)\n        allowed',
            'allowed',
            'half_weights',
        ),
    ]
]


def tests_of(row: Mutation) -> list[str]:
    paths = {file.stem.removeprefix('test_'): file for file in FILES}
    return [str(paths[name].relative_to(ROOT)) for name in row.tests.split()]


def killer(tests: list[str], row: Mutation | None = None) -> str:
    "Return the first test that fails in a copy of the checkout; '' if all pass."
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / 'copy'
        shutil.copytree(ROOT, root, ignore=shutil.ignore_patterns('.git', '__pycache__', 'nbs'))
        if row:
            file = root / 'fastxtend_amp' / row.file
            text = file.read_text(encoding='utf-8')
            if text.count(row.line) != 1:
                raise SystemExit(f'{row.file} has {text.count(row.line)} times: {row.line}')
            file.write_text(text.replace(row.line, row.change), encoding='utf-8')
        env = {**os.environ, 'PYTHONPATH': str(root), 'OMP_NUM_THREADS': '1', 'PYTHONDONTWRITEBYTECODE': '1'}
        options = ['-x', '-q', '--tb=no', '-W', 'ignore', '-p', 'no:cacheprovider']
        command = [sys.executable, '-m', 'pytest', *options, *tests]
        done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=3600)
    failed = [line for line in done.stdout.splitlines() if line.startswith(('FAILED', 'ERROR'))]
    return '' if done.returncode == 0 else (failed or ['does not run'])[0].partition('::')[2] or 'does not run'


def main(words: list[str]) -> None:
    rows = [row for row in MUTATIONS if not words or any(word in row.why + row.file for word in words)]
    if broken := killer(sorted({test for row in rows for test in tests_of(row)})):
        sys.exit(f'without a change this fails: {broken}')
    survived = 0
    for row in rows:
        start, found = time.time(), killer(tests_of(row), row)
        survived += not found
        told = f'killed by {found[:60]}' if found else 'SURVIVED'
        print(f'{row.file:26} {row.why[:60]:60} {time.time() - start:4.0f} s  {told}', flush=True)
    print(f'{len(rows) - survived} of {len(rows)} killed')
    sys.exit(bool(survived))


if __name__ == '__main__':
    main(sys.argv[1:])
