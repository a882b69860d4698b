"Sphinx extension: what readers search for leads to the section that answers it, whatever the words of its heading."
from docutils import nodes
from sphinx import addnodes
from sphinx.errors import ExtensionError

WORDS = {
    'start': {
        'Installation and devices': 'install, Windows, Intel Mac, requirements, Python version, '
                                    'minimum PyTorch version, fastai version, conda, pip install, '
                                    'without CUDA, no kernel image, telemetry, Jupyter, ipykernel, kernel',
        'Import it last': 'torch.jit.script is deprecated, import order',
        'Does it work on my device?': 'supported platforms, macOS, fastxtend_amp_check, report a bug, issue, '
                                      'tested on GPU',
        'Which call for which GPU or other device?':
            'MacBook, XPU, Intel GPU, Intel Arc, which GPU, GPU, old GPU, '
            'which number format, T4, V100, P100, GTX, A100, H100, RTX 2080, RTX 3060, '
            'RTX 3080, RTX 3090, GeForce, '
            'RTX 4090, RTX 5090, AMD, ROCm, Apple Silicon, Mac, M1, M2, M3, MPS, GTX 1080, '
            'supports FP8, supports TF32, supports bf16, use bf16, RTX bf16, bf16 on T4, bf16 on V100',
        'On a CPU': 'laptop without GPU, AMX, Ryzen, Intel Core',
        'bf16 or fp16 for my model?':
            'precision, which precision should I use, fp16 vs bf16, to_fp16 vs to_bf16, float16, bfloat16 vs float16, '
            'regression, forecasting, reinforcement learning'},
    '03_gpus_compile_xla': {
        'Several GPUs (DDP)': 'multi GPU, multi-GPU, multiple GPUs, DDP, distributed, distributed training, '
                                         'two GPUs, Kaggle two T4, accelerate launch',
        'FSDP2': 'FSDP, fully_shard',
        'DataParallel': 'DataParallel, to_parallel',
        'torch.compile': 'compile, inductor',
        'XLA and TPU': 'TPU, XLA'},
    'troubleshooting': {
        'The loss is NaN': 'which layer, find the layer, '
                           'my loss is NaN, not a number, NaN loss, loss NaN fp16, training failed, NaN, infinite, '
                           'loss becomes infinite, learning rate finder fails, lr_find fails, '
                           'inf, overflow, IndexError, lr_find NaN, lr_find error, index 0 is out of bounds, '
                           'validation loss NaN, TerminateOnNaNCallback, early stopping NaN, 1e-8, eps, epsilon, pow',
        'The loss does not fall': 'training got stuck, loss not decreasing, loss stuck, does not learn, '
                                  'stuck at chance level, '
                                  'silent overflow',
        'The loss scale keeps dropping': 'skipped steps, loss scale too low, it has been reset to, '
                                          'how many steps were skipped, n_skipped',
        'Mixed precision is not faster': 'num_workers, data loading, '
                                         'fp16 slow on CPU, no speedup, training is not faster, '
                                         'to_bf16 not faster, bf16 not faster, slow, slower than fp32, '
                                         'not faster, speedup, tensor cores, multiples of 8, '
                                 'no speedup on GPU, speed up training, channels last',
        'Some layers are slower in 16 bits': 'depthwise, depthwise convolution slow, MobileNet, EfficientNet, '
                                    'GhostNet, is_depthwise',
        'CUDA out of memory': 'out of memory, OOM, GPU memory, memory, VRAM, save memory, '
                                            'gradient checkpointing, activation checkpointing, '
                                            'bf16 memory, increase batch size, memory usage larger with fp16',
        'RuntimeError: expected scalar type Half but found Float':
            'expected scalar type, expected m1 and m2 to have the same dtype, autograd.Function, '
            'mat1 and mat2, RNN input dtype, Unexpected floating ScalarType, Input dtypes must be the same, '
            'both vectors to have same dtype, dtype mismatch, '
            'Input type, torch.cuda.HalfTensor, model.half',
        'ValueError: Attempting to unscale FP16 gradients': 'Attempting to unscale FP16 gradients, unscale error, '
                                                             'checkpoint in fp16, trainable parameters were 16-bit',
        'RuntimeError: could not create a primitive descriptor':
            "could not create a primitive descriptor, not implemented for 'Half', LSTM bf16 error, GRU error",
        'RuntimeError: value cannot be converted to type c10::Half without overflow': 'masked_fill, padding mask',
        'RuntimeError: ... are unsafe to autocast': 'unsafe to autocast, BCELoss, binary_cross_entropy',
        "RuntimeError: view size is not compatible with input tensor's size and stride": 'view size is not compatible',
        "UnboundLocalError: ... 'res'": "UnboundLocalError, load_learner fails, 'dict' object has no attribute 'dls', "
                                        'PosixPath, WindowsPath',
        'Which callbacks run in a report, comparison or diagnosis?': 'MixUp, CutMix, trackers'},
    'coming_from': {'Coming from another library': 'migrate from PyTorch amp, apex, plain PyTorch amp, torch.cuda.amp',
                    'fastai 2': 'to_native_fp16, uninstall, is it safe, '
                                'difference to fastai, does to_fp16 still work, fastai to_fp16, '
                                'learn.scaler, get_scale, to_fp16 does nothing, go back to fastai',
                    'Lightning and Fabric': '16-mixed, bf16-mixed, bf16-true, lr_scheduler, self.log',
                    'Side by side': 'compare with Accelerate, Fabric, Lightning'},
    'api_methods': {'Shared arguments': 'FloatingPointError, max_skips, growth_interval, GradScaler growth interval, '
                                        'grad_scaler, init_scale, disable loss scaling, '
                                        'turn off loss scaling, NaN gradients, skip_nonfinite'},
    'operators': {'What autocast runs in which dtype': 'autocast operators, operator list, which operators'},
    'api_callback': {'MixedPrecision': "learn.mixed_precision.scale, 'NoneType' object has no attribute 'scale', "
                              'get current loss scale, learn.mixed_precision.skipped, '
                              'skip step callback, scale_loss, second backward, gradient penalty'},
    'changelog': {'Changelog': 'what changed, what is new, release notes'},
    'contributing': {'Contributing': 'contribute, licence, license, run the tests',
                     'A precision of your own': 'write your own precision, custom precision',
                     'To add ...': 'new precision, new device'},
    '01_tutorial': {'Train': 'first run, is it on',
                    'Which precision is fastest?': 'benchmark my model, fastest precision, measure, is bf16 worth it, '
                                              'is bf16 faster on my machine',
                    'Which module breaks?': 'which layer overflows, debug overflow, headroom, plot report',
                    'When training fails': 'recover from NaN'},
    '02_save_and_export': {'Save and resume': 'checkpoint, GradScaler state checkpoint, load checkpoint, save, resume, '
                                              'resume training, SaveModelCallback, '
                                              'crash during training, continue from last epoch, continue training, '
                                              'new process, second process, continue a run, '
                                              'resume from checkpoint loss scale, Google Drive, Colab disconnect',
                           'Export': "load_learner, export, deploy, deployment, serve, export model inference, "
                                     "export learner production, "
                                     "load model without fastxtend_amp"},
    'guarantees': {'The same numbers': 'reproducible, deterministic, training loop, PyTorch loop',
                   'What is kept when': 'old checkpoint, checkpoint from fastai, crash while saving, '
                                        'killed, disk full, corrupt file, '
                                             'optimi',
                   'What is not guaranteed': 'LBFGS, double model, float64, closure, '
                                             'two optimizers, second optimizer, limits, limitations, not supported, '
                                             'No module named fastxtend_amp',
                   'What is tested': 'applications, accuracy, final accuracy'},
    'evidence': {'Speed on CPUs': 'benchmarks, benchmark, is bf16 faster on CPU, overhead per batch',
                 'Speed on GPUs, measured by others': 'GPU speed-up, how much faster, '
                                                      'how much faster will training get, '
                                                      'benchmark A100, benchmark V100'},
    'how_it_works': {'The loss scale': 'loss scale, underflow',
                     'Number formats': 'number format, bf16, bfloat16, fp16, what is bf16, what is fp16, '
                                       'mantissa, float16 and bfloat16',
                     'Autocast': 'what is mixed precision, mixed precision, '
                                  'Adam eps, are weights float32, weights still float32, '
                                  'are weights float16 after training',
                     'When a step is skipped': 'running_mean NaN, BatchNorm NaN, batch norm statistics',
                     'One training step': 'callback order',
                     'How the report works': 'gradient differs',
                     'What importing changes': 'monkey patch'},
    'pytorch': {
        'Any PyTorch model: a loop, Lightning, the Trainer':
            'LightningModule, report without a learner, underflow_overflow, Trainer, Hugging Face Trainer, '
            'accelerator.prepare, fabric.setup, plain PyTorch, own training loop',
        'Train as the report says': '16-mixed without fastai',
        'Modules in fp32': 'fp32 module without a learner',
        'The loss scale': 'GradScalerKwargs, GradScaler',
        'If training is worse than in fp32': '16-true, accuracy worse, accuracy worse than fp32, accuracy drop, '
                                            'bf16 accuracy',
        'If the loss becomes NaN later': 'Lightning NaN, NaN in my own loop, NaN after some epochs',
        "A LightningModule's own training_step": 'training_step, compute_loss'},
    'recipes': {
        'Recipes': 'early stopping, EarlyStoppingCallback, lr_find, learning rate finder, freeze, '
                   'unfreeze layers, unet, U-Net, segmentation, tabular, GAN, '
                   'tta, fine_tune',
        'Keep modules in fp32':
            'do not use, custom loss, Dice, focal loss, loss function, multi-label, '
            'fp32_modules, matches no module, turn off mixed precision for one layer, one layer, '
            'exclude a layer from fp16, '
            'exclude layers, keep layer in fp32, disable autocast for part of model, '
            'disable autocast in part of my model, softmax in fp32, '
            'LayerNorm, batchnorm, '
            'keep batchnorm fp32',
        'Gradient accumulation and clipping': 'gradient clipping, gradient accumulation, clip_grad, clip grad norm',
        'Fix overflows while training': 'on_overflow',
        'Report on a laptop, train on Colab or Kaggle': 'Kaggle T4, train on a GPU, unet_learner',
        'Get the batch that failed': 'bad batch, which batch, find the batch',
        'Inference, and turning mixed precision off':
            'inference, undo, switch off, disable, '
            'predict, predict after load_learner, change precision after loading, get_preds, '
            'test time augmentation, export for inference, '
            'how to turn off mixed precision, disable mixed precision, disable AMP, turn off, '
            'turn off mixed precision, go back to fp32, to_fp32',
        'Logging: CSVLogger and TensorBoard': 'see the loss scale during training, TensorBoard, logging, '
                                              'log the loss scale, export CSVLogger, '
                                              'Cannot pickle closed files',
        'Weights & Biases (wandb), MLflow': 'W&B, wandb, weights and biases, MLflow, wandb loss scale',
        'Gradient norms': 'gradient norm, grad norm',
        'Hugging Face models': 'HuggingFace, Hugging Face, transformers, dict batch, BERT, DeBERTa, collate_fn',
        'timm models, fused optimizers': 'timm, vision transformer, ResNet, CNN, fused optimizer, weight decay',
        'Text: AWD_LSTM, LSTM, GRU': 'LSTM, GRU, RNN, text, text classification, language model, NLP',
        'Averaged weights: EMA': 'EMA, averaged weights',
        '8-bit optimizers': '8-bit optimizer, 8bit, bitsandbytes, AdamW8bit',
        'A frozen base in 16 bits (LoRA)': 'LoRA, peft, adapters, frozen model, fine-tune',
        'TF32': 'TF32',
        'FP8': 'FP8, float8',
        '16-bit weights': 'half weights, master weights, Kahan summation, pure bf16',
        'ONNX, TorchScript, quantization': 'ONNX, onnxscript, export ONNX, TorchScript, quantization'},
}


def add_entries(app, doctree):
    "Put index entries before the sections; Sphinx's search shows what they lead to first."
    words = dict(WORDS.get(app.env.docname, {}))
    for section in [*doctree.findall(nodes.section)]:
        entries = [('single', word, section['ids'][0], 'main', None)
                   for word in words.pop(section.next_node(nodes.title).astext(), '').split(', ') if word]
        if entries: section.parent.insert(section.parent.index(section), addnodes.index(entries=entries))
    if words: raise ExtensionError(f'{app.env.docname} has no section {", ".join(words)}')


def setup(app):
    # Sphinx keeps no index entries of pages that it does not read again.
    app.connect('env-get-outdated', lambda app, env, added, changed, removed: list(WORDS))
    app.connect('doctree-read', add_entries)
    return {'parallel_read_safe': True, 'parallel_write_safe': True}
