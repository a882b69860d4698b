"Sphinx extension: what readers search for leads to the section that answers it, whatever the words of its heading."
from docutils import nodes
from sphinx import addnodes
from sphinx.errors import ExtensionError

WORDS = {
    'install': {
        'Install': 'requirements, Python version',
        'Which call for which GPU or other device?':
            'which GPU, T4, V100, A100, RTX 3090, AMD, Apple, MPS, Windows, macOS'},
    '04_processes_compile_xla': {
        'Several GPUs (multi-GPU, DDP)': 'multi GPU, multiple GPUs, DDP, distributed, notebook_launcher',
        'FSDP2': 'FSDP, fully_shard',
        'DeepSpeed': 'DeepSpeed',
        'torch.compile': 'compile, inductor',
        'XLA and TPU': 'TPU, XLA'},
    'faq': {
        'The loss is NaN': 'my loss is NaN, NaN loss, NaN, inf, overflow',
        'The loss scale keeps dropping': 'skipped steps, loss scale too low',
        'bf16 or fp16?': 'bf16 on T4, bf16 on V100, fp16 vs bf16',
        'It is slower than fp32': 'slow, speed, channels last',
        'Memory, CUDA out of memory (OOM)': 'out of memory, OOM, GPU memory, memory',
        'Expected Half but found Float': 'expected scalar type, mat1 and mat2, dtype mismatch',
        'Your own GradScaler': 'GradScaler, scale_loss'},
    '02_which_precision': {'Which is the fastest?': 'which precision, fastest precision, measure'},
    '03_resume_and_export': {'Save and resume': 'load checkpoint, save', 'Export': 'export'},
    'guarantees': {'The same numbers': 'reproducible, deterministic'},
    'how_it_works': {'The loss scale': 'loss scale, underflow'},
    'recipes': {
        'Keep modules in fp32': 'fp32_modules, exclude layers, keep layer in fp32, LayerNorm',
        'Colab and Kaggle': 'Colab, Kaggle',
        'Skip non-finite steps in bf16': 'NaN gradients, skip_nonfinite',
        'Inference': 'inference, predict, get_preds, disable mixed precision, turn off',
        'lr_find': 'lr_find, learning rate finder',
        'Logging: CSVLogger, TensorBoard, Weights & Biases': 'wandb, TensorBoard, logging',
        'Saving the best model, and resuming in a new process': 'resume, resume training, SaveModelCallback',
        'Hugging Face (HuggingFace) models': 'HuggingFace, Hugging Face, transformers',
        'timm models, fused optimizers': 'timm, vision transformer, fused optimizer',
        'Segmentation: U-Net': 'unet, segmentation',
        'LSTM, AWD_LSTM': 'LSTM, GRU, RNN',
        'Gradient clipping, accumulation': 'gradient clipping, gradient accumulation',
        'Averaged weights: EMA and SWA': 'EMA, SWA',
        'TF32': 'TF32',
        'FP8': 'FP8, float8',
        'ONNX, TorchScript, quantization': 'ONNX, TorchScript, quantization'},
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
    app.connect('doctree-read', add_entries)
    return {'parallel_read_safe': True, 'parallel_write_safe': True}
