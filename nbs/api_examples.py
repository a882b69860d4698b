"Examples of the API page, by public name; the tests run each of them, with a small learner `learn`."
EXAMPLES = {
    'Learner.to_fp16':
        "learn.to_fp16()    # or with arguments: learn.to_fp16(fp32_modules=nn.BatchNorm1d)\n"
        "learn.fit_one_cycle(1)",
    'Learner.to_bf16':
        "learn.to_bf16()\n"
        "learn.fit_one_cycle(1)",
    'Learner.to_amp':
        "learn.to_amp()              # by device\n"
        "learn.to_amp(measure=True)  # by measuring",
    'Learner.to_fp32':
        "learn.to_bf16().fit(1)\n"
        "learn.to_fp32().fit(1)",
    'Learner.precision':
        "learn.to_fp16(init_scale=1024)\n"
        "learn.fit(1)\n"
        "print(learn.precision.scale, learn.precision.n_skipped)",
    'Learner.precision_report':
        "report = learn.precision_report()\n"
        "print(report)\n"
        "report.plot()",
    'Learner.compare_precision':
        "comparison = learn.compare_precision(n_steps=20)\n"
        "print(comparison)\n"
        "comparison.apply(learn)",
    'Learner.precision_decision':
        "learn.to_amp(measure=True)\n"
        "print(learn.precision_decision)",
    'Learner.to_half_weights':
        "learn.to_half_weights()\n"
        "learn.fit_one_cycle(1)",
    'Learner.to_channelslast':
        "learn.to_channelslast(amp_mode='bf16')\n"
        "learn.fit(1)",
    'loss_scale': "learn = Learner(dls, model, metrics=[loss_scale, skipped_steps])",
    'skipped_steps': "learn = Learner(dls, model, metrics=[loss_scale, skipped_steps])",
    'MixedPrecision': "learn.fit(1, cbs=MixedPrecision('bf16'))    # for one fit",
    'MixedPrecision.scale_loss':
        "learn.to_fp16()  # in an event of a callback:\n"
        "learn.precision.scale_loss(learn.model(x).mean()).backward()",
    'MixedPrecision.state_dict':
        "learn.to_fp16()\n"
        "state = learn.precision.state_dict()",
    'MixedPrecision.load_state_dict':
        "state = learn.to_fp16().precision.state_dict()\n"
        "learn.precision.load_state_dict({**state, 'scale': 1024.})",
    'MixedPrecision.plot_scales':
        "learn.to_fp16().fit(1)\n"
        "learn.precision.plot_scales()",
    'HalfWeights': "learn.fit(1, cbs=MixedPrecision(HalfWeights('bf16')))",
    'AMPMode': "AMPMode('bfloat16') is AMPMode.BF16",
    'precision_support':
        "precision_support()                  # all devices of this machine\n"
        "precision_support('cpu')",
    'PrecisionReport':
        "report = learn.precision_report('fp16')\n"
        "report.verdicts['fp16'].call",
    'PrecisionReport.plot':
        "report = learn.precision_report()\n"
        "report.plot()",
    'Verdict':
        "verdict = learn.precision_report('bf16').verdicts['bf16']\n"
        "print(verdict.verdict, verdict.call)",
    'PrecisionComparison':
        "comparison = learn.compare_precision('bf16', n_steps=20)\n"
        "comparison.table[['speed-up', 'loss difference']]",
    'PrecisionComparison.apply':
        "comparison = learn.compare_precision('bf16', n_steps=20)\n"
        "comparison.apply(learn, 'bf16')",
    'PrecisionComparison.plot':
        "comparison = learn.compare_precision('bf16', n_steps=20)\n"
        "comparison.plot()",
    'PrecisionChoice':
        "learn.to_amp(measure=True)\n"
        "learn.precision_decision.choices['fp32'].fp32_modules",
    'fused': "learn = Learner(dls, model, opt_func=fused('AdamW'))",
    'kahan':
        "learn = Learner(dls, model, opt_func=kahan('AdamW'))\n"
        "learn.to_half_weights(master_weights=False)",
    'keep_freed_memory': "keep_freed_memory()                  # in the first cell",
}
