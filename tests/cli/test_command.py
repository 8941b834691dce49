"""The command line: what it prints, how it fails, and that it fails in one line."""

import signal

import pytest

from helpers.command import PATIENCE, START, one_line, printed, regard, regard_process, started


@pytest.mark.processes
def test_version():
    from regard import __version__

    assert regard_process("--version").stdout == f"regard {__version__}\n"


def test_explain_shows_the_worked_example():
    shown = regard("explain")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "cat · The = 0.2 × 0.3 + 0.1 × 0.4 = 0.1\n" in shown.stdout
    assert "within the tolerance" in shown.stdout


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_explain_fits_the_terminal_and_leaves_no_trailing_spaces(columns):
    sentence = "The cat sat on the mat because it was very tired indeed"
    shown = printed("explain", sentence, "--heads", "2", COLUMNS=str(columns))
    lines = shown.splitlines()
    assert max(map(len, lines)) <= columns
    assert all(line == line.rstrip() for line in lines)
    assert "\x1b" not in shown


def test_explain_follows_the_word_asked_for():
    shown = printed("explain", "your own sentence", "--heads", "2", "--word", "own", "--causal")
    assert "Followed closely: own" in shown
    assert "3 of 9 scores are removed in every head" in " ".join(shown.split())


def test_explain_is_coloured_only_where_colour_is_wanted():
    assert "\x1b[" in regard("explain", FORCE_COLOR="1", NO_COLOR="", TERM="xterm-256color").stdout


@pytest.mark.processes
def test_explain_on_a_terminal_that_cannot_draw():
    shown = regard_process("explain", PYTHONIOENCODING="ascii")
    assert shown.returncode == 0
    assert "S = Q K?" in shown.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["explain", ""], "There is no word in ''."),
        (["explain", " ... "], "There is no word in ' ... '."),
        (["explain", "--word", "caat"], "Did you mean 'cat'?"),
        (["explain", "--word", "zebra"], "There is no word 'zebra' in 'The cat sat on the mat'."),
        (["explain", "a b", "--heads", "3"], "Numbers of heads that fit: 1, 2, 4, 8."),
        (["explain", "a b", "--heads", "0"], "got heads=0"),
        (["explain", "a b", "--dim", "0"], "got heads=2 and dim=0"),
        (["explain", "--heads", "2"], "takes no heads"),
        (["explain", "--zzz"], "No such option: --zzz. See regard explain --help."),
        (["nope"], "No such command 'nope'. See regard --help."),
        (["explan"], "Did you mean 'explain'? See regard --help."),
        (["explain", "--heads", "x"], "Invalid value for '--heads': "),
        (["answer"], "Missing argument 'question'. See regard answer --help."),
    ],
)
def test_a_mistake_is_one_line_and_status_2(words, message):
    one_line(regard(*words), message)


def test_a_place_that_cannot_be_written_to_is_one_line(tmp_path):
    (tmp_path / "file").write_text("in the way")
    result = regard("convert", "books-gpt2", str(tmp_path / "file" / "model"))
    assert result.returncode == 1
    assert result.stderr == f"regard: {tmp_path / 'file'}: File exists.\n"


@pytest.mark.processes
def test_a_run_that_stops_says_how_to_go_on_and_a_start_that_nothing_is_resumed(tmp_path):
    (tmp_path / "a.txt").write_text("one two three four. " * 200)
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(f"""
task = "language modelling"
output = "{tmp_path / "run"}"
device = "cpu"
model = {{ kind = "gpt2", config = {{ dim = 8, depth = 1, heads = 2 }} }}
tokenizer = {{ size = 260 }}
schedule = {{ steps = 5 }}
data = {{ root = "{tmp_path}", length = 16, train = [{{ format = "text", files = ["a.txt"] }}] }}
""")
    words = ["--set", "schedule.steps=1000000", "--set", f"data.cache={tmp_path / 'the cache'}"]
    process = started("train", recipe, *words, "--resume")
    for line in process.stderr:
        if line.startswith("step 50/"):
            process.send_signal(signal.SIGINT)
            break
        said = line
    out, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert "There is nothing to resume in" in said
    assert out.endswith(
        f"Continue with: regard train {recipe} --set schedule.steps=1000000 "
        f"--set 'data.cache={tmp_path / 'the cache'}' --resume\n"
    )


def test_no_words_at_all_show_the_help():
    shown = regard()
    assert (shown.returncode, shown.stderr) == (2, "")
    assert "Usage: regard" in shown.stdout


@pytest.mark.processes
def test_a_closed_pipe_is_quiet():
    with started("explain") as process:
        process.stdout.close()  # before anything is written to it
        assert process.stderr.read() == ""
    assert process.returncode != 0


@pytest.mark.processes
def test_an_interrupt_is_quiet():
    # It comes in the middle of a command's work: at the moment PyTorch begins to load.
    start = (
        "import os, signal, sys\n"
        # A shell that runs the tests in the background has them ignore interrupts.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "def interrupt(event, details):\n"
        "    if event == 'import' and details[0] == 'torch':\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.addaudithook(interrupt)\n" + START
    )
    shown = regard_process("explain", start=start)
    assert shown.returncode == 128 + signal.SIGINT
    assert shown.stderr.strip() == ""


def test_a_warning_is_one_line_above_a_progress_bar(capsys):
    from rich.console import Console
    from rich.progress import Progress

    from regard.cli import _warn

    with Progress(console=Console(stderr=True, force_terminal=True, width=60)) as shown:
        shown.add_task("learning", total=2)
        _warn(UserWarning("Head 3 of\nlayer 1 collapsed."))
    # The line of the bar is cleared first.
    assert "\x1b[2Kregard: warning: Head 3 of layer 1 collapsed.\n" in capsys.readouterr().err
