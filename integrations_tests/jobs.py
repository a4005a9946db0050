"""Programs that tests run in a process of their own: `python -m integrations_tests.jobs NAME FOLDER`."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader

SETTINGS = {"density": 0.1, "warmup_steps": 1, "auto": False}


def lightning_checkpoints(folder: Path) -> None:
    """The files of ModelCheckpoint come and go with those of the state, and last.ckpt may be a link."""
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint

    from oktopk.integrations.lightning import OkTopkStrategy

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(20, 3)

        def train_dataloader(self) -> DataLoader:
            data = torch.randn(8, 4, 20, generator=torch.Generator().manual_seed(0))
            return DataLoader(data, batch_size=None)

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            return self.layer(batch).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def fit(steps: int, callbacks: list[ModelCheckpoint], resumed: Path | None = None) -> OkTopkStrategy:
        strategy = OkTopkStrategy(**SETTINGS)
        trainer = Trainer(
            accelerator="cpu", devices=1, strategy=strategy, max_steps=steps, callbacks=callbacks, logger=False,
            enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=bool(callbacks),
        )  # fmt: skip
        trainer.fit(Module(), ckpt_path=resumed)
        return strategy

    newest = {"save_top_k": 1, "filename": "{step}"}
    whole = fit(6, [  # Lightning tells callbacks of a class apart by when they save
        ModelCheckpoint(folder / "whole", every_n_train_steps=2, save_last="link", **newest),
        ModelCheckpoint(folder / "weights", every_n_train_steps=3, save_weights_only=True, **newest),
    ])  # fmt: skip
    names = sorted(path.name for path in (folder / "whole").iterdir())
    assert names == ["last.ckpt", "step=6.ckpt", "step=6.ckpt.oktopk-rank0.pt"], names
    assert [path.name for path in (folder / "weights").iterdir()] == ["step=6.ckpt"]
    saved = torch.load(folder / "whole" / "step=6.ckpt.oktopk-rank0.pt", weights_only=True)
    kept = whole.state.state_dict()["residuals"]
    assert all(torch.equal(saved["residuals"][name], kept[name]) for name in kept)
    assert any(part.count_nonzero() for part in kept.values())
    assert (folder / "whole" / "last.ckpt").is_symlink()
    resumed = fit(7, [], folder / "whole" / "last.ckpt")
    assert resumed.state.step == 7, resumed.state.step


def only_process(folder: Path) -> None:
    """Frameworks leave the model of a single process alone: a warning, and training goes on."""
    from accelerate import Accelerator
    from transformers import PretrainedConfig, PreTrainedModel, Trainer, TrainingArguments

    from oktopk.integrations import accelerate, huggingface

    warnings: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("oktopk").addHandler(handler)

    class Model(PreTrainedModel):
        config_class = PretrainedConfig

        def __init__(self, config: PretrainedConfig) -> None:
            super().__init__(config)
            self.layer = nn.Linear(4, 1)
            self.post_init()

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": self.layer(x).square().mean()}

    arguments = TrainingArguments(
        output_dir=str(folder), use_cpu=True, max_steps=3, report_to=[], disable_tqdm=True, save_steps=2,
        remove_unused_columns=False,
    )  # fmt: skip
    trainer = Trainer(Model(PretrainedConfig()), arguments, train_dataset=[{"x": torch.ones(4)}] * 24)
    trainer.add_callback(huggingface.OkTopkCallback(trainer, **SETTINGS))
    trainer.train()
    assert trainer.state.global_step == 3
    assert not list(folder.rglob("oktopk-rank*"))

    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(4, 1))
    assert accelerate.register(accelerator, model, **SETTINGS) is None
    assert len(warnings) == 2, warnings
    assert all("only process" in text for text in warnings), warnings


if __name__ == "__main__":
    torch.set_num_threads(1)
    globals()[sys.argv[1]](Path(sys.argv[2]))
    print("as it must be")
