"""Ends saving processes at every moment of a save, each in a fork of this one; prints (moment, step that loads, same).

Arguments: an empty folder. `same`: the weights are those that were saved.
"""

import json
import os
import shutil
import signal
import sys
from pathlib import Path

import torch
from torch import nn

import rpruntime as rp
from rpruntime.checkpoints import files as checkpoint_files
from rpruntime.inline import InlineSession

KEEP = 1


def in_a_fork(work) -> tuple[int, str]:
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(reader)
        code = 1
        try:
            os.write(writer, str(work()).encode())
            code = 0
        finally:
            os._exit(code)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        said = pipe.read()
    return os.waitpid(pid, 0)[1], said


def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    model[2].bias.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    session = InlineSession({"quiet": True})
    return rp.RoundPipe(model, optimizer, loss_fn=nn.functional.mse_loss, num_microbatches=2, session=session)


def weights(pipe) -> str:
    pipe.synchronize()
    return repr([value.tolist() for value in pipe.model.state_dict().values()])


def save(folder: Path, kill: int | None) -> str:
    """Two saves; the second ends this process at its moment number `kill`."""
    pipe = build()
    moments: list[str] = []
    said = []
    for step in range(2):
        pipe.forward_backward(torch.ones(4, 4), torch.ones(4, 2))
        pipe.step()
        said.append(weights(pipe))

        def at(moment: str, step: int = step) -> None:
            if step == 1:
                moments.append(moment)
                if len(moments) - 1 == kill:
                    os.kill(os.getpid(), signal.SIGKILL)

        checkpoint_files.at = at
        pipe.save_checkpoint(folder, keep=KEEP, wait=True)
    return json.dumps([moments, said])


def load(folder: Path) -> str:
    pipe = build()
    info = pipe.load_checkpoint(folder)
    return json.dumps([info.step, weights(pipe)])


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    status, said = in_a_fork(lambda: save(folder, None))
    assert status == 0
    moments, expected = json.loads(said)
    for number, moment in enumerate(moments):
        shutil.rmtree(folder)
        status, _ = in_a_fork(lambda number=number: save(folder, number))
        assert os.WIFSIGNALED(status), status
        status, said = in_a_fork(lambda: load(folder))
        step, found = json.loads(said) if status == 0 else (-1, "")
        print(json.dumps([moment, step, step > 0 and found == expected[step - 1]]))
        if moment == "synced":  # the next run saves the same step over what the killed one left
            status, said = in_a_fork(lambda: save(folder, None))
            assert status == 0 and sorted(path.name for path in folder.iterdir()) == ["step-2"], list(folder.iterdir())


if __name__ == "__main__":
    main()
