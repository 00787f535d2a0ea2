"""README, quickstart and tutorials, followed command by command as ``tests/blocks.py`` says, in a folder like a checkout."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import itertools
import os
import re
import select
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cocod_accel.cli.main import parse
from cocod_accel.config.loading import load_training_config
from cocod_accel.config.settings import Config
from tests.blocks import DRY_RUN, NUMBERS_AND_ORDER_VARY, NUMBERS_VARY, Block, BlockError, difference, patched, read_blocks

ROOT = Path(__file__).parents[1]
PAGES = [
    "README.md",
    "docs/quickstart.md",
    *(str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs/tutorials").glob("*.md"))),
]
#: A minute or more each: ``make test`` only checks their commands, and ``make test-slow`` follows them.
SLOW_PAGES = tuple(f"docs/tutorials/{page}.md" for page in ("choose_period", "compare", "mixed_gpus", "sharded"))
#: Followed where the package is there: make test-integrations.
NEEDS = {"docs/tutorials/lightning.md": "lightning", "docs/tutorials/machines_that_come_and_go.md": "torchft"}
#: What one block may take, on a machine that is busy with other things.
BLOCK_SECONDS, PAGE_SECONDS = 180, 500
#: Set up or test everything: that make knows how is enough here.
MAKE = re.compile(r"^make (quickstart|test)\b", re.MULTILINE)
#: The README's runs are not cut short for its reader; for this test they are.
SHORTER = "task.train_limit=640 task.test_limit=250 schedule.epochs=2 schedule.decay_epochs=[] logging.trackers=[]"
#: What the README's loop leaves to its reader.
PRELUDE = """\
import torch
from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def evaluate(model):
    assert model(torch.ones(1, 4)).shape == (1, 2)


"""
LOOP = """\
for step in range(12):
    accelerator.backward(model(torch.ones(8, 4)).square().mean())
    optimizer.step()
    optimizer.zero_grad()
assert sync.stats().rounds == 12
"""


# --------------------------------------------------------------------------------------------- a page's folder


class Follower:
    """Follows a page: a folder with links to everything of the checkout, an environment, and what was printed last."""

    def __init__(self, page: str, folder: Path, home: Path) -> None:
        self.page, self.folder = page, folder
        self.last_printed = ""
        for path in ROOT.iterdir():
            if path.name[0] != "." and path.name not in ("runs", "data", "wandb", "plan", "report"):
                (folder / path.name).symlink_to(path)
        (folder / ".venv").symlink_to(sys.prefix)
        syncs = (ROOT / page).is_file() and "wandb sync" in (ROOT / page).read_text()
        # No account, no accelerate configuration and no workers of whoever runs the tests; no file of theirs is written.
        own = ("WANDB_", "ACCELERATE_", "RANK", "LOCAL_", "WORLD_SIZE", "MASTER_", "PYTHONPATH")
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(own)},
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(folder),
            "HOME": str(home),
            "TMPDIR": str(home / "tmp"),
            "LC_ALL": "C.UTF-8",
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "HF_HUB_OFFLINE": "1",
            # What is compared does not come from wandb; a page that syncs its files needs them.
            **({} if syncs else {"WANDB_MODE": "disabled"}),
            "DS_ACCELERATOR": "cpu",  # else DeepSpeed, if it is installed, says on standard output that it has found no GPU
        }

    def follow(self, block: Block) -> None:
        if block.is_saved:
            (self.folder / block.title).write_text(block.text)
        elif block.language == "diff":
            path = self.folder / block.title
            path.write_text(patched(path.read_text(), block.text))
        elif block.mark == DRY_RUN:
            with contextlib.chdir(self.folder):
                for line in logical_lines(block.text):
                    check_dry(shlex.split(line))
        elif block.language == "bash":
            self.last_printed = self._run(["bash", "-c", STOP_AT_ERRORS + self._shortened(block.text)])
        elif block.language == "python":
            script = self.folder / f"block_{block.line}.py"
            script.write_text(self._with_prelude(block.text))
            self.last_printed = self._run(["python", script.name])
        elif self.page != "README.md":  # whose output is that of the quickstart, and compared with it below
            found = difference(block.text, self.last_printed, block.mark)
            if found:
                raise BlockError(f"it prints something else\n{found}")

    def _shortened(self, text: str) -> str:
        if self.page == "README.md":
            text = re.sub(r"^((?:cocod train|accelerate launch)[^#\n]*)", rf"\1 {SHORTER} ", text, flags=re.MULTILINE)
        return MAKE.sub(r"make -n \1", text)

    def _with_prelude(self, text: str) -> str:
        return PRELUDE + re.sub(r"^\.\.\..*\n", LOOP, text, flags=re.MULTILINE) if self.page == "README.md" else text

    def _run(self, command: list[str], attempts: int = 3) -> str:
        """Its standard output. Whatever it started is ended with it, workers in sessions of their own too."""
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            # Files, not pipes: a pipe stays open as long as anybody who was left behind holds it.
            process = subprocess.Popen(
                command,
                cwd=self.folder,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
            try:
                code: int | None = process.wait(BLOCK_SECONDS)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                self._end_all()
                process.wait()
            out.seek(0)
            err.seek(0)
            printed, said = out.read(), err.read()
        if code not in (0, None) and ABORTED_AT_EXIT in said and attempts > 1 and self._is_plain():
            return self._run(command, attempts - 1)
        if code != 0:
            how = f"did not end within {BLOCK_SECONDS} s" if code is None else f"ended with {code}"
            raise BlockError(f"it {how}\n{printed[-2000:]}\n{said[-4000:]}")
        return printed

    def _is_plain(self) -> bool:
        script = self.folder / "train.py"
        return script.exists() and "cocod_accel" not in script.read_text()

    def _end_all(self) -> None:
        """Until nothing is left, because what is being ended may start something."""
        while pids := list(self._started()):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    handle = os.pidfd_open(pid)
                    try:
                        signal.pidfd_send_signal(handle, signal.SIGKILL)
                        select.select([handle], [], [])  # readable when it is gone
                    finally:
                        os.close(handle)

    def _started(self) -> Iterator[int]:
        """Processes whose environment names this page's folder: nobody else's does."""
        mark = f"PYTHONPATH={self.folder}".encode()
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if mark in _environment(process).split(b"\0"):
                    yield int(process.name)


def _environment(process: Path) -> bytes:
    """What the process was started with; a program that is just being started has none for a moment."""
    deadline = time.monotonic() + 1
    while not (found := (process / "environ").read_bytes()) and time.monotonic() < deadline:
        os.readlink(process / "exe")  # kernel threads and the dead have none either, nor a program: an OSError
        os.sched_yield()
    return found


#: A plain accelerate script that has done everything, end_training() too, aborts now and then on a busy machine: see
#: cocod_accel/comm/shutdown.py. Where nothing of this package can prevent it, the block is run again.
ABORTED_AT_EXIT = "terminate called without an active exception"
#: The command that failed is named.
STOP_AT_ERRORS = "set -euo pipefail\ntrap 'echo \"failed: $BASH_COMMAND\" >&2' ERR\n"


@pytest.fixture(scope="module")
def follow(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Follower]:
    """Follows a page, once."""
    # What programs keep for their user, matplotlib's list of fonts for one, is made once for all pages.
    home = tmp_path_factory.mktemp("home")
    (home / "tmp").mkdir()

    @functools.cache
    def followed(page: str) -> Follower:
        follower = Follower(page, tmp_path_factory.mktemp("page"), home)
        for block in read_blocks((ROOT / page).read_text()):
            try:
                follower.follow(block)
            except BlockError as error:
                raise BlockError(f"{page}, block of {block.language} in line {block.line}: {error}") from None
        return follower

    return followed


# --------------------------------------------------------------------------- commands that are not started


def logical_lines(text: str) -> list[str]:
    """Commands of a block: comments and line ends that are escaped taken away."""
    return [line for line in text.replace("\\\n", " ").splitlines() if line.strip() and not line.startswith("#")]


def check_dry(words: list[str]) -> None:
    """Everything about a command that can be known without the machines it needs."""
    variables = list(itertools.takewhile(lambda word: re.match(r"[A-Z_]+=", word), words))
    words, environment = words[len(variables) :], {**os.environ, **dict(word.split("=", 1) for word in variables)}
    if words[:2] == ["cocod", "train"]:
        load_training_config(words[2:])
    elif words[:2] == ["cocod", "plan"]:
        load_training_config(list(itertools.takewhile(lambda word: not word.startswith("--"), words[2:])))
    elif words[:2] == ["accelerate", "launch"]:
        check_accelerate(words[2:])
    elif words[0] == "torchrun":
        check_torchrun(words[1:])
    elif words[0] == "sbatch" or words[0].startswith("launch/"):
        line = ["bash", *words[words[0] == "sbatch" :]]
        done = subprocess.run(line, env=environment | {"DRY_RUN": "1"}, capture_output=True, text=True, timeout=60)
        if done.returncode != 0:
            raise BlockError(done.stderr)
        would = shlex.split(done.stdout)
        if "torchrun" in would:
            check_torchrun(would[would.index("torchrun") + 1 :])
        load_training_config([word for word in words if word.startswith("configs/") or "=" in word])
    elif words[:2] == ["wandb", "sync"]:
        folders = [path for pattern in words[2:] for path in Path().glob(pattern)]
        assert folders
        assert all(list(path.glob("run-*.wandb")) for path in folders)
    else:
        raise BlockError(f"nobody knows how to check {shlex.join(words)} without starting it")


def check_accelerate(words: list[str]) -> None:
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.commands.launch import launch_command_parser

    options = launch_command_parser().parse_args(words)
    file = load_config_from_file(options.config_file)
    machines, address = options.num_machines or file.num_machines, options.main_process_ip or file.main_process_ip
    rank = file.machine_rank if options.machine_rank is None else options.machine_rank
    assert options.module
    check_run(options.training_script, options.training_script_args, options.num_processes or file.num_processes)
    if machines > 1:
        assert 0 <= int(rank) < machines
        assert address not in (None, "127.0.0.1"), "machines cannot find each other there"
        assert options.main_process_port or file.main_process_port


def check_torchrun(words: list[str]) -> None:
    from torch.distributed.run import get_args_parser

    options = get_args_parser().parse_args(words)
    assert 0 <= options.node_rank < int(options.nnodes)
    assert options.module
    check_run(options.training_script, options.training_script_args, int(options.nnodes) * int(options.nproc_per_node))


def check_run(module: str, arguments: list[str], num_processes: int) -> Config:
    if module == "cocod_accel.plan.measure":
        _, seconds, *arguments = arguments
        assert float(seconds) > 0
    else:
        assert module == "cocod_accel.train"
    config = load_training_config(arguments)
    assert config.cluster.num_workers == num_processes, "the run would refuse to start"
    return config


# -------------------------------------------------------------------------------------------------- the pages


@pytest.mark.timeout(PAGE_SECONDS)
@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=pytest.mark.slow) if page in SLOW_PAGES else page for page in PAGES]
)
def test_a_page_does_what_it_says(page: str, follow: Callable[[str], Follower]) -> None:
    if importlib.util.find_spec(NEEDS.get(page, "torch")) is None:
        pytest.skip(f"{NEEDS[page]} is not installed")
    follow(page)


@pytest.mark.parametrize("page", SLOW_PAGES)
def test_a_slow_page_names_commands_options_and_settings_that_exist(page: str) -> None:
    text = (ROOT / page).read_text()
    lines = [line for block in read_blocks(text) if block.language == "bash" for line in logical_lines(block.text)]
    commands = [match.group(1) for line in lines if (match := re.search(r"\b(?<!/)cocod ([^|>]*)", line))]
    assert commands
    for words in map(shlex.split, commands):
        options = parse([word for word in words if "$" not in word])
        if words[0] in ("train", "plan"):  # what simulate takes is not whole without its cluster
            load_training_config(options.configs)


@pytest.mark.timeout(PAGE_SECONDS)
def test_the_readme_shows_the_table_of_the_quickstart(follow: Callable[[str], Follower]) -> None:
    """Who is first is left to the machine."""
    (shown,) = [block.text for block in read_blocks((ROOT / "README.md").read_text()) if block.language == "text"]
    tables = ["\n".join(text.splitlines()[:4]) for text in (shown, follow("docs/quickstart.md").last_printed)]
    assert difference(tables[0], tables[1], NUMBERS_AND_ORDER_VARY) == ""


def test_the_quickstart_page_is_what_make_quickstart_does() -> None:
    """With ``schedule.*`` cut short, and a folder without a date."""
    recipe = subprocess.run(["make", "-n", "quickstart"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    made = [line.removeprefix(".venv/bin/") for line in recipe.splitlines() if line.startswith(".venv/bin/cocod")]
    blocks = read_blocks((ROOT / "docs/quickstart.md").read_text())
    shown = [line for block in blocks if block.language == "bash" for line in logical_lines(block.text)]
    kept = [re.sub(r" schedule\.\S+", "", line) for line in shown if re.match("cocod (train|compare)", line)]
    assert [re.sub(r"runs/quickstart-\d+-\d+", "runs/quickstart", line) for line in made] == kept


# ------------------------------------------------------------------------------------------- the reader itself


def test_blocks_are_read_with_language_title_mark_and_line() -> None:
    page = 'A\n\n```python title="a.py"\nprint(1)\n```\n```bash\npython a.py\n```\n<!-- numbers vary -->\n```text\n1\n```\n'
    assert read_blocks(page) == [
        Block("python", "a.py", "", "print(1)\n", 3),
        Block("bash", "", "", "python a.py\n", 6),
        Block("text", "", NUMBERS_VARY, "1\n", 10),
    ]


@pytest.mark.parametrize(
    ("page", "message"),
    [
        ("```\nls\n```\n", "no language is not executed"),
        ("```console\nls\n```\n", "console is not executed"),
        ("```yaml\na: 1\n```\n", "needs title"),
        ('```python title="a.py"\n1\n```\n```bash\nls\n```\n', "nothing after it runs it"),
        ('```diff title="a.py"\n+1\n```\n', "has not been saved"),
        ("```text\n1\n```\n", "no command stands before"),
        ("<!-- dry-run -->\n```bash\nls\n```\n```text\n1\n```\n", "no command stands before"),
        ("<!-- dry run -->\n```bash\nls\n```\n", "means nothing"),
        ("```bash\nls\n", "never closed"),
    ],
)
def test_a_block_that_nothing_executes_is_an_error(page: str, message: str) -> None:
    with pytest.raises(BlockError, match=message):
        read_blocks(page)


def test_outputs_are_compared() -> None:
    assert difference("a 1\nb 2", "a 1  \nb 2\n") == ""
    assert difference("a 1\nb 2", "a 1\nb 3\n") != ""
    assert difference("a 1", "a 1\nb 2\n") != ""
    assert difference("a ...\n...\nz", "a 1\nb 2\nc 3\nz\n") == ""
    assert difference("a ...\n...\nz", "b 1\nz\n") != ""


def test_numbers_and_widths_may_vary_but_no_words_rows_or_cells() -> None:
    shown = "run    s to 85%\n---------\ncocod      7.9  \nssgd  11.3 ±0.4\n"
    assert difference(shown, "run  s to 75%\n------\ncocod  17.92\nssgd  1e-3 ±2\n", NUMBERS_VARY) == ""
    assert difference(shown, "run  s to 75%\n------\nlocal  17.92\nssgd  1 ±2\n", NUMBERS_VARY) != ""
    assert difference(shown, "run  s to 75%\n------\ncocod  never\nssgd  1 ±2\n", NUMBERS_VARY) != ""
    assert difference(shown, "run  s to 75%\n------\ncocod  17.92\nssgd  1\n", NUMBERS_VARY) != ""
    assert difference("cpu_2", "cpu_3", NUMBERS_VARY) != "", "a name's digits are no number"


def test_rows_may_change_places_only_where_a_page_says_so() -> None:
    shown, printed = "run  s\na  1\nb  2\n", "run  s\nb  3\na  4\n"
    assert difference(shown, printed, NUMBERS_VARY) != ""
    assert difference(shown, printed, NUMBERS_AND_ORDER_VARY) == ""
    assert difference(shown, printed + "c  5\n", NUMBERS_AND_ORDER_VARY) != ""
    assert difference(shown + "...\n", printed + "c  5\n", NUMBERS_AND_ORDER_VARY) == ""
    assert difference(shown + "...\n", printed.replace("a", "c"), NUMBERS_AND_ORDER_VARY) != ""


def test_a_diff_fits_in_one_place() -> None:
    assert patched("a\nb\nc\nd\n", " a\n+x\n@@\n-c\n+y\n d\n") == "a\nx\nb\ny\nd\n"
    for text in ("b\n", "a\nc\na\n"):
        with pytest.raises(BlockError, match="instead of one"):
            patched(text, " a\n+x\n")


@pytest.mark.parametrize(
    "command",
    [
        "ssh host make",
        "cocod train configs/quickstart.yaml algorithm.perod=3",
        "accelerate launch --config_file configs/accelerate/homogeneous_16gpu.yaml -m cocod_accel.train SIXTEEN",
        "accelerate launch --config_file configs/accelerate/gpu_8.yaml -m cocod_accel.train SIXTEEN",
        "torchrun --nnodes 2 --node_rank 2 --nproc_per_node 8 -m cocod_accel.train SIXTEEN",
        "torchrun --nnodes 2 --node_rank 1 --nproc_per_node 4 -m cocod_accel.train SIXTEEN",
        "wandb sync runs/nowhere/*",
    ],
)
def test_a_dry_run_notices_what_could_not_start(command: str) -> None:
    with contextlib.chdir(ROOT), pytest.raises((AssertionError, ValueError)):
        check_dry(shlex.split(command.replace("SIXTEEN", "configs/homogeneous_16gpu.yaml")))


def test_a_command_that_fails_is_named_and_what_it_started_is_ended(tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    follower = Follower("page.md", tmp_path, home=tmp_path)
    started = "setsid sleep 1000 & echo $! > pid\nfalse\n"
    with pytest.raises(BlockError, match=r"ended with 1(.|\n)*failed: false"):
        follower.follow(Block("bash", "", "", started, 1))
    assert list(follower._started()) == []
