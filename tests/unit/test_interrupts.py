"""Interrupts at the worst moments, in real processes that send themselves real signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from dalipipe.interrupts import Stopping, Undisturbed

ROOT = Path(__file__).parents[2]


def run(program: str) -> subprocess.CompletedProcess[str]:
    head = "import os, signal, sys, time\nfrom dalipipe.interrupts import Stopping, Undisturbed\nme = os.getpid()\n"
    words = [sys.executable, "-c", head + program]
    return subprocess.run(words, check=False, capture_output=True, text=True, timeout=60, cwd=ROOT)


@pytest.fixture(autouse=True)
def _handlers_are_left_as_they_were():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    yield
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_an_interrupt_waits_until_the_work_is_done() -> None:
    done: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        with Undisturbed(), Undisturbed():
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
            done.append(1)
    assert done == [1]


def test_an_error_of_the_work_goes_through() -> None:
    with pytest.raises(ZeroDivisionError):
        with Undisturbed():
            _ = 1 / 0


def test_other_threads_are_left_alone() -> None:
    seen: list[object] = []

    def work() -> None:
        with Undisturbed(), Stopping():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(10)
    assert seen == [signal.getsignal(signal.SIGINT)]


def test_whoever_insists_is_heard_before_the_work_is_done() -> None:
    program = """
import dalipipe.interrupts as interrupts
interrupts._PATIENCE_S = 0.2
try:
    with Undisturbed():
        os.kill(me, signal.SIGINT)
        end_s = time.monotonic() + 30
        while time.monotonic() < end_s:
            os.kill(me, signal.SIGINT)
            time.sleep(0.01)
        print("was not heard")
except KeyboardInterrupt:
    print("heard")
"""
    assert run(program).stdout == "heard\n"


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_clean_up_is_not_broken_into_by_more_signals(name: str) -> None:
    program = f"""
stopping = Stopping(ends_process=True)
try:
    with stopping:
        try:
            os.kill(me, signal.{name})
        finally:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM):
                os.kill(me, number)
            try:
                raise ValueError  # also where the clean-up handles an error of its own
            except ValueError:
                os.kill(me, signal.SIGINT)
            print("cleaned up")
except KeyboardInterrupt:
    os.kill(me, signal.SIGINT)  # and not into what comes after
    print(stopping.number)
class Late:
    def __del__(self, kill=os.kill, me=me, number=signal.SIGINT):
        kill(me, number)
late = Late()  # dies when the interpreter takes its modules apart
"""
    done = run(program)
    assert (done.stdout, done.stderr) == (f"cleaned up\n{int(signal.Signals[name])}\n", "")
    assert done.returncode == 0


@pytest.mark.parametrize(
    "swallow",
    [
        # A finaliser: Python prints what it raises, and goes on.
        "class Holder:\n    def __del__(self):\n        os.kill(me, signal.SIGINT)\n        time.sleep(0)\nHolder()",
        # What native modules do when their own imports are broken off.
        "try:\n    os.kill(me, signal.SIGINT)\n    time.sleep(0)\nexcept BaseException:\n    pass",
    ],
)
def test_an_interrupt_that_was_swallowed_comes_again(swallow: str) -> None:
    program = f"""
with Stopping(ends_process=True) as stopping:
    try:
        exec({swallow!r})
        time.sleep(30)
        print("went on")
    except KeyboardInterrupt:
        print("came again")
"""
    done = run(program)
    assert (done.stdout, done.stderr) == ("came again\n", "")


def test_what_was_put_off_by_an_import_waits_for_undisturbed_work_too(tmp_path: Path) -> None:
    (tmp_path / "slow_module.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    program = f"""
sys.path.insert(0, {str(tmp_path)!r})
work = "with Undisturbed():\\n    os.kill(me, signal.SIGALRM)\\n    time.sleep(0.3)\\n    print('done')\\ntime.sleep(9)"
with Stopping():
    try:
        exec("import slow_module\\n" + work)
    except KeyboardInterrupt:
        print("interrupted")
"""
    done = run(program)
    assert (done.stdout, done.stderr) == ("done\ninterrupted\n", "")


def test_a_clean_up_without_end_is_ended_by_another_signal() -> None:
    program = """
import dalipipe.interrupts as interrupts
interrupts._CLEAN_UP_S = 0.1
with Stopping(ends_process=True):
    try:
        os.kill(me, signal.SIGTERM)
    finally:
        end_s = time.monotonic() + 30
        while time.monotonic() < end_s:
            os.kill(me, signal.SIGTERM)
            time.sleep(0.01)
        print("went on")
"""
    done = run(program)
    assert (done.returncode, done.stdout) == (128 + signal.SIGTERM, "")
    assert "in the middle of its clean-up" in done.stderr


def test_an_exit_that_takes_long_can_be_broken_off_and_not_before() -> None:
    program = """
import atexit
import dalipipe.interrupts as interrupts
def hang():
    os.kill(me, signal.SIGINT)
    print("not at once", flush=True)
    interrupts._CLEAN_UP_S = 0.1
    end_s = time.monotonic() + 30
    while time.monotonic() < end_s:
        os.kill(me, signal.SIGINT)
        time.sleep(0.01)
with Stopping(ends_process=True):
    atexit.register(hang)
"""
    done = run(program)
    assert (done.returncode, done.stdout) == (128 + signal.SIGINT, "not at once\n")
    assert "Traceback" not in done.stderr


def test_signals_that_the_shell_told_to_ignore_stay_ignored() -> None:
    program = """
signal.signal(signal.SIGINT, signal.SIG_IGN)
with Stopping():
    os.kill(me, signal.SIGINT)
    print("went on")
print(signal.getsignal(signal.SIGINT) is signal.SIG_IGN)
"""
    assert run(program).stdout == "went on\nTrue\n"


def test_an_import_comes_to_its_end_unless_somebody_insists(tmp_path: Path) -> None:
    slow = "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(0.3)\nprint('imported')\n"
    (tmp_path / "slow_module.py").write_text(slow)
    stubborn = "import os, signal, time\nwhile True:\n    os.kill(os.getpid(), signal.SIGINT)\n    time.sleep(0.01)\n"
    (tmp_path / "stubborn_module.py").write_text(stubborn)
    program = f"""
import dalipipe.interrupts as interrupts
interrupts._PATIENCE_S = 0.2
sys.path.insert(0, {str(tmp_path)!r})
for module in ("slow_module", "stubborn_module"):
    try:
        with Stopping():
            exec("import " + module + "\\ntime.sleep(30)")
    except KeyboardInterrupt:
        print("interrupted")
"""
    done = run(program)
    assert (done.stdout, done.stderr) == ("imported\ninterrupted\ninterrupted\n", "")
