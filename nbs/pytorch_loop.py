"A PyTorch training loop that computes the same numbers as fastxtend_amp."
import torch
from torch.nn.utils import clip_grad_norm_

DTYPES = {'fp32': None, 'bf16': torch.bfloat16, 'fp16': torch.float16}


class Trainer:
    def __init__(self, model, opt, loss_func, precision, device='cpu',
                 init_scale=65536., n_acc=None, clip=None):
        self.model, self.opt, self.loss_func = model, opt, loss_func
        self.dtype, self.device = DTYPES[precision], device
        self.n_acc, self.clip, self.skipped_steps = n_acc, clip, 0
        # One scaler for all fits keeps the scale; checkpoints store its state_dict.
        self.scaler = torch.amp.GradScaler(
            device, init_scale=init_scale, enabled=precision == 'fp16')
        self.buffers = [b for b in model.buffers() if b.is_floating_point()]

    def forward(self, x, y):
        # before_batch to after_loss; before PyTorch 2.13, pass cache_enabled=False as well
        with torch.autocast(self.device, self.dtype, enabled=self.dtype is not None):
            pred = self.model(x).float()
            return self.loss_func(pred, y)

    def fit(self, n_epoch, train_dl, valid_dl):
        self.samples, self.finite = 0, [b.clone() for b in self.buffers]
        for _ in range(n_epoch):
            self.model.train()
            for x, y in train_dl: self.one_batch(x, y)
            self.model.eval()
            with torch.no_grad():
                losses = [(self.forward(x, y).item(), len(y)) for x, y in valid_dl]
            total, n = sum(loss * k for loss, k in losses), sum(k for _, k in losses)
            print(f'validation loss: {total / n:.4f}')

    def one_batch(self, x, y):
        loss = self.forward(x, y)
        if self.n_acc: loss = loss / (self.n_acc / len(y))
        # before_backward
        self.scaler.scale(loss).backward()
        self.samples += len(y)
        if self.n_acc and self.samples < self.n_acc: return
        self.samples = 0
        # before_step: unscale, then clip; step does nothing if a gradient is not finite
        self.scaler.unscale_(self.opt)
        if self.clip: clip_grad_norm_(self.model.parameters(), self.clip)
        self.scaler.step(self.opt)
        # after_step
        scale = self.scaler.get_scale()
        self.scaler.update()
        self.after_step(skipped=self.scaler.get_scale() < scale)
        self.opt.zero_grad()

    def after_step(self, skipped):
        self.skipped_steps += skipped
        # the running statistics of BatchNorm
        for buffer, finite in zip(self.buffers, self.finite):
            if skipped: buffer.copy_(torch.where(buffer.isfinite(), buffer, finite))
            finite.copy_(buffer)
