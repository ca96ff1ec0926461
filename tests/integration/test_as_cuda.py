"""Scripts of other libraries that say "cuda", as their documentation has them, under --as-cuda."""

import pytest

RUN = ("-m", "torch_openreg", "run", "--as-cuda")

ACCELERATE = """
import sys
import tempfile

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset

set_seed(0)
accelerator = Accelerator(mixed_precision=sys.argv[1], gradient_accumulation_steps=2)
assert accelerator.device.type == "cuda", accelerator.device
model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
x = torch.randn(64, 4)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 16, pin_memory=True)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
losses = []
for epoch in range(30):
    for inputs, targets in loader:
        assert inputs.is_cuda
        with accelerator.accumulate(model):
            loss = F.mse_loss(model(inputs).float(), targets)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    losses.append(accelerator.gather(loss.detach()).mean().item())
folder = tempfile.mkdtemp()
accelerator.save_state(folder)
accelerator.load_state(folder)
print(losses[-1] < losses[0] / 4, next(model.parameters()).device)
"""

TRAINER = """
import sys
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

set_seed(0)
config = GPT2Config(
    vocab_size=64, n_layer=2, n_head=2, n_embd=32, n_positions=32, bos_token_id=0, eos_token_id=63
)
model = GPT2LMHeadModel(config)
tokens = [torch.randint(1, 60, (12,)) for _ in range(16)]
data = [{"input_ids": row, "labels": row} for row in tokens]
arguments = TrainingArguments(
    output_dir=tempfile.mkdtemp(), max_steps=12, per_device_train_batch_size=4, report_to=[],
    logging_steps=1, save_steps=6, disable_tqdm=True, learning_rate=1e-2, **{sys.argv[1]: True},
)
assert arguments.device == torch.device("cuda:0") and arguments.n_gpu == torch.cuda.device_count()
trainer = Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=data[:4])
trainer.train()
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
trainer.train(resume_from_checkpoint=True)
prompt = torch.ones(1, 3, dtype=torch.long, device="cuda")
out = model.generate(prompt, max_new_tokens=4, do_sample=False, pad_token_id=0)
print(float(losses[-1]) < float(losses[0]), trainer.evaluate()["eval_loss"] > 0, out.device)
"""

LIGHTNING = """
import lightning
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, index):
        x, y = batch
        assert x.is_cuda and self.device.type == "cuda"
        loss = F.mse_loss(self.layer(x), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


lightning.seed_everything(0)
x = torch.randn(32, 4)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 8)
for accelerator, devices, precision in (("gpu", 1, "32-true"), ("cuda", [1], "16-mixed")):
    model = Model()
    trainer = lightning.Trainer(
        accelerator=accelerator, devices=devices, precision=precision, max_epochs=8, logger=False,
        enable_checkpointing=False, enable_progress_bar=False,
    )
    trainer.fit(model, loader)
    print(trainer.strategy.root_device, trainer.callback_metrics["loss"].item() < 0.2)
fabric = lightning.Fabric(accelerator="cuda", devices=[1])
fabric.launch()
print(fabric.device)
"""


def train(run, tmp_path, text, *arguments, env=None):
    path = tmp_path / "script.py"
    path.write_text(text)
    done = run("", env, arguments=(*RUN, path, *arguments))
    assert done.code == 0, done.err
    return done.out.splitlines()


@pytest.mark.parametrize("precision", ["no", "fp16", "bf16"])
def test_accelerate_script_trains_as_cuda(run, tmp_path, precision):
    assert train(run, tmp_path, ACCELERATE, precision) == ["True cuda:0"]


@pytest.mark.parametrize("precision, devices", [("fp16", "1"), ("bf16", "1"), ("bf16", "2")])
def test_transformers_trainer_script_trains_as_cuda(run, tmp_path, precision, devices):
    """With two devices the Trainer takes DataParallel, as on a machine with two GPUs."""
    lines = train(run, tmp_path, TRAINER, precision, env={"OPENREG_DEVICE_COUNT": devices})
    assert lines[-1] == "True True cuda:0"


def test_lightning_script_trains_as_cuda(run, tmp_path):
    lines = train(run, tmp_path, LIGHTNING)
    assert [line for line in lines if line.startswith("cuda")] == [
        "cuda:0 True",
        "cuda:1 True",
        "cuda:1",
    ]
