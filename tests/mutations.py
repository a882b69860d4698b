"""Change one line of the package, and see whether a test fails: `python tests/mutations.py [NAME...]`.

A row of MUTATIONS is a line that matters and a wrong one in its place. The command copies the checkout, applies one
row, runs the tests that cover it until one fails, and prints 'killed', or 'SURVIVED' if none does. Tests that fail
without a change do not count. A mutation that survives means that a test is missing, or that the line is useless.
IDEAS are faults that become rows when their line has been written: give each a file, a line and a replacement.

    --list             print the rows and ideas
    --root FOLDER      mutate another checkout; by default the one that this file is in
    --tests PATH ...   run these tests for every row
"""

import argparse, os, re, shutil, subprocess, sys, tempfile, time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
EQUALITY, OPEN, SWITCHES, SKIPS, SCALE, FILES = (
    f'tests/training/test_{name}.py'
    for name in ('equality', 'nothing_left', 'switches', 'skips', 'scale', 'checkpoint')
)
AUTOCAST, COMPILE, METRICS, ARGUMENTS = (
    f'tests/training/test_{name}.py' for name in ('autocast', 'compile', 'metrics', 'arguments')
)
MODULES, FP8, HALF, DEVICES, TF32 = (
    f'tests/precisions/test_{name}.py' for name in ('fp32_modules', 'fp8', 'half_weights', 'devices', 'tf32')
)


class Mutation(NamedTuple):
    file: str  # in the package
    line: str  # a part of one line of the file, which occurs once
    replacement: str
    why: str  # what a user would meet
    tests: tuple[str, ...]  # the files that cover it, the likeliest first


M = Mutation
CALLBACK, LOOP, SCALING = 'training/callback.py', 'training/loop.py', 'training/scaling.py'
MUTATIONS = {
    # -- what is open
    'after_cancel_step does nothing': M(
        CALLBACK,
        'and scaling.found_inf is not True: scaling.cancel()',
        'and False: pass',
        'a step that another callback cancelled changes the scale',
        (SCALE, SKIPS, OPEN),
    ),
    'a step left open is not cancelled': M(
        SCALING,
        'if self.step is not None: self.cancel()',
        'pass',
        'after an exception in a step the next one fails or changes the scale',
        (OPEN, SCALE, EQUALITY),
    ),
    'a failed fit in fp32 leaves the precision set in it': M(
        LOOP,
        '        _close(self, failed=True)   ',
        '        pass   ',
        'a callback added in a fit that fails stays open',
        (SWITCHES, OPEN),
    ),
    'an exchange leaves learn.scaler': M(
        CALLBACK,
        'fit.learn.scaler = self.fit = None',
        'self.fit = None',
        'a loop that scales its loss with `learn.scaler` uses the scaler of an earlier fit',
        (OPEN, SWITCHES),
    ),
    'autocast stays on in callbacks after a cancelled batch': M(
        CALLBACK,
        'def after_cancel_batch(self): self.learn._scopes[-1].close()',
        'def after_cancel_batch(self): pass',
        'a callback that computes in `after_cancel_batch` computes in 16 bits',
        (OPEN,),
    ),
    'failed is not passed on': M(
        LOOP,
        '            _close(learn, failed=True)',
        '            _close(learn)',
        'after an exception half of an accumulation enters the next step',
        (OPEN,),
    ),
    # -- skipped steps
    'buffers of a failed batch are not repaired': M(
        SCALING,
        'if failed and self.buffers: self.buffers.after_step(True)',
        'pass',
        'an exception in a batch that overflowed leaves NaN in BatchNorm',
        (SKIPS,),
    ),
    'buffers are restored everywhere': M(
        SCALING,
        'keep = flat.isfinite()',
        'keep = torch.zeros_like(flat, dtype=torch.bool)',
        'a skipped step takes back finite statistics',
        (SKIPS,),
    ),
    'most steps: at half of them': M(
        SCALING, 'if 2 * skipped <= n', 'if 2 * skipped < n', 'a warning about half of the steps', (SKIPS,)
    ),
    'the end of an epoch reads nothing': M(
        CALLBACK,
        'if scaling := self._scaling: scaling.read()',
        'pass',
        "skips that the device decided are noticed in the next epoch",
        (SCALE, SKIPS, METRICS),
    ),
    'the first step may be skipped on the device': M(
        'training/optimizers.py',
        'has_state = all(map(opt.state.get, params))',
        'has_state = True',
        'a skipped first step leaves a state',
        (SKIPS,),
    ),
    'the flag stays on the optimizer': M(
        'training/optimizers.py',
        "for name in ('grad_scale', 'found_inf'): vars(self.opt).pop(name, None)",
        'pass',
        'fp32 training after a skip steps nowhere',
        (OPEN, SKIPS),
    ),
    # -- gradients and the scale
    'kept gradients count as scaled': M(
        SCALING,
        'self.is_scaled = type(self.learn)._do_grad_opt is Learner._do_grad_opt',
        'self.is_scaled = True',
        'loops that keep gradients train with wrong ones',
        (EQUALITY,),
    ),
    'lr_find leaves its steps in the history': M(
        SCALING, 'del self.history.read()[self.first_step:]', 'pass', 'scales of `lr_find` in plots', (SCALE,)
    ),
    'lr_find leaves its scale': M(
        SCALING,
        'self.scaler.load_state_dict(self.before_lr_find)',
        'pass',
        'training starts at a wrong scale',
        (SCALE,),
    ),
    # -- casts, files
    'old casts are used': M(
        'training/fit.py',
        'if casts is None or casts != self.casts: torch.clear_autocast_cache()',
        'pass',
        'predictions with the weights of an earlier batch',
        (AUTOCAST,),
    ),
    'casts do not follow the weights': M(
        'training/fit.py',
        '(self.model, sum(p._version for p in self.model.parameters()))',
        '(self.model, 0)',
        'predictions with weights that a callback has changed',
        (AUTOCAST,),
    ),
    'the mode of a file is lost': M(
        'training/checkpoint.py',
        'if path.exists(): shutil.copymode(path, part)',
        'pass',
        'a private file is readable',
        (FILES,),
    ),
    # -- no master weights
    'the rest of a rounding is dropped': M(
        'precisions/half_weights.py',
        'if rest is None or not (state := self._state(p)): continue',
        'continue',
        'the first updates of a fit are lost',
        (HALF,),
    ),
    'a rest is rounded away': M(
        'precisions/half_weights.py',
        'data, rest = exact.to(dtype), rest - (exact - before)',
        'data, rest = exact.to(dtype), 0 * rest',
        'weights drift from fit to fit',
        (HALF,),
    ),
    'gradients keep their dtype': M(
        'precisions/half_weights.py',
        'if p.grad is not None: p.grad = p.grad.to(dtype)',
        'pass',
        'an accumulation over fits fails',
        (HALF, EQUALITY),
    ),
}

# Faults whose line the new core has not got yet: what is wrong, and the files that cover it.
IDEAS = {
    'before_batch: autocast is entered in the outermost scope, not in the innermost': (OPEN, AUTOCAST),
    'before_batch: the cache of an autocast context around the fit is not cleared': (AUTOCAST,),
    'before_batch: `fit.use_model` only where the model is another one': (SKIPS, MODULES),
    'before_batch: outside of a scope it enters autocast, without an error': (SWITCHES,),
    'after_pred: bf16 predictions go to the loss': (AUTOCAST,),
    'after_loss: the scope is not closed': (OPEN, AUTOCAST),
    'after_loss: `loss` stays in 16 bits': (AUTOCAST,),
    'before_backward: the loss is scaled twice': (EQUALITY,),
    'before_step: raises CancelStepException although the device skips': (SKIPS,),
    'before_step: order 11 sees scaled gradients (unscale in after_step)': (EQUALITY,),
    'after_step: the scale is not updated': (EQUALITY, SCALE),
    'after_batch: the scope counts as a batch for callbacks of a higher order: load raises': (FILES, SCALE),
    'after_fit: the fit is closed at the event of a `validate()` inside it': (EQUALITY, OPEN),
    'after_fit: it warns although on_overflow is ignore': (SKIPS,),
    'close: learn.scaler stays': (OPEN, SWITCHES),
    'close: after an exception in one context the others stay open': (OPEN,),
    'open: several precision callbacks are allowed': (SWITCHES,),
    'open: one precision object in two callbacks is allowed': (SWITCHES,),
    'open: on_overflow=fix without a static scaler in bf16': (SKIPS,),
    'setting `learn` in a batch does not raise: autocast stays on': (SWITCHES,),
    '_with_events: the outermost scope does not restore autocast': (OPEN,),
    '_with_events: a single batch closes the fit: the scale of a loop over one_batch starts again': (EQUALITY,),
    '_with_events: a fit after a loop over one_batch does not close what that left': (OPEN, SCALE),
    '_with_events: the precision wraps steps of other events': (EQUALITY, HALF),
    '_run_scope: `waiting` is done in the batch, or never': (SWITCHES,),
    '_exchange: the new callback has no scopes: a switch in mid-fit leaves it closed': (SWITCHES,),
    '_exchange: run stays False': (SWITCHES,),
    "set_precision: fastai's own callbacks stay": (SWITCHES,),
    'set_precision: checked after the old one is removed': (ARGUMENTS,),
    'start: gradients that are zero and None are scaled, or those that are kept are not': (EQUALITY,),
    'unscale: found_inf of the step before stays where the gradients are not ours': (SKIPS,),
    'unscale: steps without gradients enter the history': (SCALE,),
    'unscale: a parameter in two groups is unscaled twice': (EQUALITY,),
    'update: the skip of the host does not enter skips_in_a_row': (SCALE,),
    'update: the low scale is set from the gradients of a skipped step': (SCALE,),
    'update: 16 times the largest gradient: 32, or 8; floor of log2: ceil': (SCALE,),
    'update: a scale below 2**-24 stays; at 2**-24 it starts again': (SCALE,),
    "update: the user's own scaler is left low": (SCALE,),
    'update: a low init_scale of the user counts as low': (SCALE,),
    'end: leftovers are not unscaled; or are zeroed although they are finite': (EQUALITY, OPEN),
    'end: before_lr_find only without an exception': (SCALE,),
    'history: -0.0 is not a skip': (SCALE,),
    'history: read only at 512 steps: after an exception the last ones are missing': (SCALE,),
    'buffers: those that the forward pass did not write are cloned': (SKIPS,),
    'buffers: values after a skipped step become the good ones without repair': (SKIPS,),
    'buffers: of an exchanged model are not followed': (SKIPS,),
    'load: with_opt=False loads the scale': (FILES,),
    'load: a file without a scale keeps the newest instead of the first': (FILES,),
    'load: in a batch it does not raise': (FILES,),
    "save: the optimizer's own state_dict has the key afterwards": (FILES,),
    'save: with_opt=False writes the scale': (FILES,),
    'save: the file is written in place': (FILES,),
    'export: metrics of this package stay in the file': (FILES,),
    'load_state_dict: a static scale or enabled=False takes the state': (SCALE,),
    'load_state_dict: nan is accepted': (SCALE, FILES),
    '__getstate__: a copy made in a fit has its Fit': (OPEN,),
    'precision_as: the own callback is not restored after an exception': (SWITCHES,),
    'precision_as: allowed in a batch': (SWITCHES,),
    'amp_context: modules in fp32 are not kept outside of a fit': (MODULES,),
    'amp_context: inside a fit it replaces forwards again and takes them off': (MODULES, SWITCHES),
    'fp32 forward: inputs stay 16-bit; or nested ones do': (MODULES,),
    'fp32 forward: a forward on the instance is not given back': (MODULES,),
    "fp32 forward: a copy runs the original's weights": (MODULES,),
    'to_amp: fp16 before bf16': (SWITCHES, DEVICES),
    'AMPMode: names are not lowered; torch dtypes are unknown': (DEVICES,),
    'emulation is warned of in each fit': (DEVICES,),
    'frozen parameters: check counts those of 16 bits': (EQUALITY, AUTOCAST),
    'flat: an exception in the step leaves the flat lists': (HALF,),
    'flat: parameters keep sharing memory after the fit': (HALF,),
    'no masters: frozen weights are rounded': (HALF,),
}


def mutate(root: Path, row: Mutation) -> None:
    file = root / 'fastxtend_amp' / row.file
    text = file.read_text(encoding='utf-8')
    if text.count(row.line) != 1:
        raise SystemExit(f'{row.file} has {text.count(row.line)} times: {row.line}')
    file.write_text(text.replace(row.line, row.replacement), encoding='utf-8')


def failures(root: Path, tests: list[str], known: set[str], first: bool) -> set[str]:
    "Run tests in a copy; return those that fail, without the known ones."
    deselect = [arg for test in known for arg in ('--deselect', test)]
    options = ['-q', '--tb=no', '-W', 'ignore', '-p', 'no:cacheprovider', *(['-x'] if first else []), *deselect]
    env = {**os.environ, 'PYTHONPATH': str(root), 'OMP_NUM_THREADS': '1', 'PYTHONDONTWRITEBYTECODE': '1'}
    command = [sys.executable, '-m', 'pytest', *options, *tests]
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=3600)
    if done.returncode not in (0, 1):
        return {'(pytest)'}  # an import that fails, for example
    return set(re.findall(r'^(?:FAILED|ERROR) (tests/.*?)(?: - .*)?$', done.stdout, re.M))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('names', nargs='*', help='parts of names of rows; all without any')
    parser.add_argument('--list', action='store_true')
    parser.add_argument('--root', type=Path, default=ROOT)
    parser.add_argument('--tests', nargs='+')
    args = parser.parse_args()
    if args.list:
        print(*MUTATIONS, f'-- {len(IDEAS)} ideas:', *IDEAS, sep='\n')
        return
    rows = {name: row for name, row in MUTATIONS.items() if any(part in name for part in args.names or [''])}
    known: dict[str, set[str]] = {}
    survived = 0
    with tempfile.TemporaryDirectory() as folder:
        for i, (name, row) in enumerate(rows.items()):
            root, start = Path(folder) / str(i), time.time()
            shutil.copytree(args.root, root, ignore=shutil.ignore_patterns('.git', '__pycache__', 'nbs'))
            tests = args.tests or [*row.tests]
            for test in tests:
                if test not in known:
                    known[test] = failures(root, [test], set(), first=False)
            mutate(root, row)
            before = set().union(*(known[test] for test in tests))
            killers = failures(root, tests, before, first=True)
            survived += not killers
            told, by = 'killed  ' if killers else 'SURVIVED', ' '.join(sorted(killers))[:90]
            print(f'{told} {name} ({time.time() - start:.0f} s) {by}', flush=True)
            shutil.rmtree(root)
    print(f'{len(rows) - survived} of {len(rows)} killed')
    sys.exit(bool(survived))


if __name__ == '__main__':
    main()
