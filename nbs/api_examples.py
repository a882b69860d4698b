"An example for each entry of the API pages, run by a test on the learner of `api.md`; a comment is what `print` shows."

EXAMPLES = {
    'to_amp': '''
learn.to_amp()                              # prints its choice
learn.to_amp(measure=True, max_seconds=1)
''',
    'to_bf16': '''
learn.to_bf16(fp32_modules=nn.BatchNorm1d)
learn.fit(1)
print(learn.mixed_precision.fp32_module_names)  # ['1']
''',
    'to_fp16': '''
learn.to_fp16(init_scale=1024)
learn.fit(1)
print(learn.mixed_precision.scale)  # 1024.0
''',
    'to_fp32': '''
learn.to_fp16().to_fp32()
print(hasattr(learn, 'mixed_precision'))  # False
''',
    'to_tf32': '''
learn.to_tf32()
if torch.cuda.is_available(): learn.fit(1)
''',
    'to_fp8': '''
learn.model = nn.Sequential(nn.Linear(6, 64), nn.Linear(64, 64), nn.Linear(64, 1))
learn.to_fp8(modules='1', min_size=64)      # needs torchao
''',
    'to_half_weights': '''
learn.to_half_weights('bf16', flat_master=True)
learn.fit(1)
''',
    'precision_as': '''
learn.to_bf16()
with learn.precision_as('fp32'): print(learn.get_preds()[0].dtype)  # torch.float32
''',
    'amp_context': '''
learn.to_bf16()
with learn.amp_context(): pred = learn.model(x)
print(pred.dtype)  # torch.bfloat16
''',
    'precision_report': '''
print(learn.precision_report())
learn.precision_report('fp16', n_batches=2, device='cuda')
''',
    'compare_precision': '''
found = learn.compare_precision('bf16', n_steps=5, max_seconds=1)
found.apply(learn)
''',
    'precision_decision': '''
learn.to_amp(measure=True, max_seconds=1)
print(learn.precision_decision.reason)
''',
    'precision_report without a learner': '''
report = precision_report(model, [(x, y)], nn.MSELoss())
print(report.verdicts['bf16'].call)  # bf16
''',
    'PrecisionReport': '''
report = learn.precision_report()
report.plot()
report.table.nsmallest(3, 'headroom')       # closest to overflow
learn.to_bf16(fp32_modules=report.verdicts['bf16'].modules)
''',
    'Verdict': '''
verdict = learn.precision_report('fp16').verdicts['fp16']
print(verdict.verdict)  # safe so far
''',
    'PrecisionComparison': '''
found = learn.compare_precision('bf16', n_steps=5, max_seconds=1)
found.plot()
found.table['speed-up']
''',
    'MixedPrecision': '''
learn = Learner(dls, model, nn.MSELoss(), cbs=MixedPrecision('fp16', init_scale=1024))
learn.fit(2)
print(sum(learn.mixed_precision.skips))  # 0
learn.mixed_precision.plot_scales()
''',
    'AMPMode': '''
learn.add_cb(MixedPrecision(AMPMode.BF16))
''',
    'LossScaleMetric': '''
learn.metrics = [LossScaleMetric(), SkippedStepsMetric()]
learn.to_fp16(init_scale=1024).fit(1)
print(learn.recorder.values[-1][2:])  # [1024, 0]
''',
    'SkippedStepsMetric': '''
learn.metrics = SkippedStepsMetric()
learn.to_fp16(init_scale=2.**60).fit(1)     # overflows
print(learn.recorder.values[-1][2])  # 4
''',
    'fused': '''
learn = Learner(dls, model, nn.MSELoss(), opt_func=fused('AdamW', betas=(.9, .95))).to_amp()
learn.fit_one_cycle(1)
''',
    'kahan': '''
learn = Learner(dls, model, nn.MSELoss(), opt_func=kahan('AdamW'))      # needs torch-optimi
learn.to_bf16(master_weights=False).fit(1)
''',
    'is_depthwise': '''
print(is_depthwise(nn.Conv2d(8, 8, 3, groups=8)))  # True
''',
    'is_grouped': '''
print(is_grouped(nn.Conv2d(8, 8, 3, groups=4)))  # True
''',
    'precision_support': '''
precision_support()
''',
}
