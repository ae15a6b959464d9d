"""Step time of our loop against one written by hand, in one process: ``python tests/bench/loop.py``.

Both train the demo model with the same config on the same batches; steps alternate, so that both see the same
machine. The hand-written loop has its batches ready; ours also reads, masks, normalises and records. Ratio of
medians at most 1.02.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent.parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default=str(ROOT / "ds_configs" / "bf16_ckpt.json"))
    parser.add_argument("--steps", type=int, default=40)
    arguments = parser.parse_args()

    import deepspeed

    from launcher.config import load_config
    from launcher.config.device import DeviceSupport
    from launcher.distributed import Distributed
    from launcher.opening import open_session
    from launcher.options import add_train_options
    from launcher.signals import StopRequest
    from models.build import build_layers
    from models.layer import repeated_names, set_recompute
    from models.losses import Objectives

    options = argparse.ArgumentParser()
    add_train_options(options)
    with tempfile.TemporaryDirectory() as folder:
        session = open_session(
            options.parse_args(
                [
                    f"--config={arguments.config}",
                    f"--output={folder}/run",
                    "--no-eval",
                    f"--steps={2 * arguments.steps}",
                ]
            ),
            Distributed.from_environment({}),
            StopRequest(),
        )
        spec = session.plan.spec
        layers = build_layers(spec)
        config = load_config(arguments.config).resolve(world_size=1, device=DeviceSupport.detect())
        if config.recompute:
            set_recompute(layers, repeated_names(layers))
        network = torch.nn.Sequential(*layers)
        engine, *_ = deepspeed.initialize(
            model=network, model_parameters=network.parameters(), config=config.deepspeed
        )
        objectives = Objectives(spec)
        ours, by_hand = [], []
        stream = session.batches()
        for step in range(arguments.steps):
            start = time.perf_counter()
            batches = next(stream)
            session.record(session.engine.train_step(batches))
            middle = time.perf_counter()
            for batch in batches:
                engine.backward(objectives(engine(batch.state), batch.targets).total)
                engine.step()
            end = time.perf_counter()
            if step >= 3:
                ours.append(middle - start)
                by_hand.append(end - middle)
        session.close()
    ratios = [a / b for a, b in zip(ours, by_hand, strict=True)]
    print(
        f"ours {statistics.median(ours):.4f} s, by hand {statistics.median(by_hand):.4f} s, "
        f"median of pairwise ratios {statistics.median(ratios):.3f} over {len(ratios)} steps"
    )


if __name__ == "__main__":
    main()
