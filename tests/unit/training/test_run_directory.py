from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from clap_zero.errors import ConfigError, LaunchError
from clap_zero.training.run_directory import RunDirectory, RunLock, read_jsonl

HOLD = """
import sys, time
from pathlib import Path
from clap_zero.training.run_directory import RunLock
lock = RunLock(Path(sys.argv[1]))
lock.acquire_alone(wait_s=0)
lock.share()
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path: Path):
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_a_second_job_is_refused_while_a_process_of_the_first_lives(tmp_path: Path, holder) -> None:
    with pytest.raises(LaunchError, match=rf"in use by another job \(process {holder.pid} on .*--run_dir"):
        RunLock(tmp_path).acquire_alone(wait_s=0.3)


def test_the_lock_of_a_killed_job_is_free_at_once(tmp_path: Path, holder) -> None:
    holder.kill()
    lock = RunLock(tmp_path)
    lock.acquire_alone(wait_s=5)
    lock.release()


def test_ranks_share_the_lock_and_the_last_one_frees_it(tmp_path: Path) -> None:
    main, other = RunLock(tmp_path), RunLock(tmp_path)
    main.acquire_alone(wait_s=0)
    main.share()
    other.share()
    main.release()
    with pytest.raises(LaunchError):
        RunLock(tmp_path).acquire_alone(wait_s=0)
    other.release()
    last = RunLock(tmp_path)
    last.acquire_alone(wait_s=0)
    last.release()


def test_a_job_that_came_between_is_named(tmp_path: Path) -> None:
    other = RunLock(tmp_path)
    other.acquire_alone(wait_s=0)
    with pytest.raises(LaunchError, match="another job took"):
        RunLock(tmp_path).share()
    other.release()


def recorded(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path)
    directory.record(
        run="train:\n  learning_rate: 0.001\n  seed: 0\ndata:\n  workers: 2\nwandb:\n  mode: auto\n",
        ds={"zero_optimization": {"stage": 2}},
        data={"train": {"fingerprint": "a"}},
    )
    directory.metrics_path.write_text('{"step": 1, "loss": 2.0}\n')
    return directory


SAME = {"run": {"train": {"learning_rate": 0.001, "seed": 0}, "data": {"workers": 2}, "wandb": {"mode": "auto"}}}


def test_an_unchanged_configuration_continues(tmp_path: Path) -> None:
    recorded(tmp_path).check_unchanged(
        **SAME, ds={"zero_optimization": {"stage": 2}}, data={"train": {"fingerprint": "a"}}, world_size=2, force=False
    )


def test_what_does_not_change_the_learning_may_differ(tmp_path: Path) -> None:
    run = {"train": {"learning_rate": 0.001, "seed": 0}, "data": {"workers": 0}, "wandb": {"mode": "disabled"}}
    recorded(tmp_path).check_unchanged(
        run=run, ds={"zero_optimization": {"stage": 2}}, data={"train": {"fingerprint": "a"}}, world_size=2, force=False
    )


def test_every_difference_is_named_and_force_accepts_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = recorded(tmp_path)
    changed = {
        "run": {"train": {"learning_rate": 0.01, "seed": 0}, "data": {"workers": 2}},
        "ds": {"zero_optimization": {"stage": 2}, "gradient_clipping": 2.0},
        "data": {"train": {"fingerprint": "b"}},
    }
    with pytest.raises(ConfigError) as error:
        directory.check_unchanged(**changed, world_size=2, force=False)
    for part in ("train.learning_rate: 0.001 -> 0.01", "ds.gradient_clipping: absent -> 2.0", "fingerprint", "--force"):
        assert part in str(error.value)
    assert capsys.readouterr().out == ""
    directory.check_unchanged(**changed, world_size=2, force=True)
    said = capsys.readouterr().out
    assert "--force continues a run with other settings" in said and "ds.gradient_clipping: absent -> 2.0" in said


@pytest.mark.parametrize(
    ("changed", "heads", "said"),
    [
        ({"objective": {"loss": "sigmoid", "mlp": "auto"}}, False, "of another model than this objective.loss makes"),
        ({"objective": {"loss": "softmax", "mlp": "off"}}, True, "of another model than this objective.mlp makes"),
        ({"objective": {"loss": "softmax", "mlp": "off"}}, False, "or --force to continue this one with the changes"),
        ({"model": {"preset": "large", "pretrained": None}}, False, "of another model than this model.preset makes"),
        ({"model": {"preset": None, "pretrained": "/new"}}, False, "if model.pretrained is the same model in another"),
    ],
)
def test_force_is_offered_only_where_the_checkpoints_could_still_fit(
    tmp_path: Path, changed: dict, heads: bool, said: str
) -> None:
    moves = changed.get("model", {}).get("pretrained") is not None
    old_model = {"preset": None, "pretrained": "/old"} if moves else {"preset": "tiny", "pretrained": None}
    old = {"objective": {"loss": "softmax", "mlp": "auto"}, "model": old_model}
    directory = RunDirectory(tmp_path)
    directory.record(run=json.dumps(old), ds={}, data={})
    checkpoint = directory.checkpoints_path / "step-00000001"
    checkpoint.mkdir(parents=True)
    if heads:
        (checkpoint / "mlp_heads.safetensors").touch()
    with pytest.raises(ConfigError) as error:
        directory.check_unchanged(run=old | changed, ds={}, data={}, world_size=2, force=False)
    assert said in str(error.value)
    checkpoint.rename(directory.path / "gone")
    directory.metrics_path.write_text('{"step": 1, "loss": 2.0}\n')
    with pytest.raises(ConfigError, match="or --force to continue this one with the changes"):
        directory.check_unchanged(run=old | changed, ds={}, data={}, world_size=2, force=False)


def test_a_broken_record_is_an_error_and_not_a_new_run(tmp_path: Path) -> None:
    directory = recorded(tmp_path)
    (tmp_path / "config.yaml").write_text("train: [")
    with pytest.raises(ConfigError, match=r"config.yaml cannot be read"):
        directory.check_unchanged(run={}, ds={}, data={}, world_size=2, force=False)


def test_a_run_without_a_step_may_still_be_corrected(tmp_path: Path) -> None:
    directory = recorded(tmp_path)
    directory.metrics_path.write_text('{"event": "start", "attempt": 1}\n')
    directory.check_unchanged(run={}, ds={}, data={}, world_size=2, force=False)


def test_a_kill_between_the_records_leaves_no_half_run(tmp_path: Path) -> None:
    recorded(tmp_path)
    written = sorted(
        (path.stat().st_mtime_ns, path.name) for path in tmp_path.glob("*.[jy]*") if "jsonl" not in path.name
    )
    assert written[-1][1] == "config.yaml", "its presence says that the others are there"


def test_held_out_data_may_change(tmp_path: Path) -> None:
    directory = recorded(tmp_path)
    data = {"train": {"fingerprint": "a"}, "val": {"fingerprint": "new"}}
    directory.check_unchanged(**SAME, ds={"zero_optimization": {"stage": 2}}, data=data, world_size=2, force=False)


def test_a_file_system_without_locks_is_said_and_used(tmp_path: Path, monkeypatch, capsys) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    lock = RunLock(tmp_path)
    lock.acquire_alone(wait_s=0)
    lock.share()
    lock.release()
    assert "no file locks here" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["sizes.json", "0.tar", "config.json", "config.yaml", "ds_config.json"])
def test_a_directory_that_holds_something_else_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine")
    with pytest.raises(ConfigError, match=f"holds {name}, which no run wrote"):
        RunDirectory(tmp_path).create()
    assert (tmp_path / name).read_text() == "mine"


def test_a_directory_with_a_run_or_a_log_is_taken(tmp_path: Path) -> None:
    recorded(tmp_path)
    (tmp_path / "train.log").write_text("")
    RunDirectory(tmp_path).create()


@pytest.mark.parametrize("content", [None, "", "- 1\n"])
def test_a_lost_record_never_lets_a_changed_run_through(tmp_path: Path, content: str | None) -> None:
    directory = recorded(tmp_path)
    if content is None:
        (tmp_path / "config.yaml").unlink()
    else:
        (tmp_path / "config.yaml").write_text(content)
    with pytest.raises(ConfigError, match=r"config.yaml is (gone|damaged)|config.yaml cannot"):
        directory.check_unchanged(**SAME, ds={}, data={}, world_size=2, force=False)
    directory.check_unchanged(**SAME, ds={}, data={}, world_size=2, force=True)


def test_a_damaged_finish_mark_is_none(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    for content in ("{}", '{"step": null}'):
        (tmp_path / "finished.json").write_text(content)
        assert directory.finished_step() is None


def test_the_current_directory_can_be_set_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run").mkdir()
    monkeypatch.chdir(tmp_path / "run")
    assert RunDirectory(Path()).set_aside() == tmp_path / "run.old-1"


def test_attempts_count_up_and_a_torn_line_is_passed_over(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    assert directory.next_attempt() == 1
    directory.metrics_path.write_text('{"event": "start", "attempt": 2}\n{"step": 1, "attem')
    assert directory.next_attempt() == 3
    assert read_jsonl(directory.metrics_path) == [{"event": "start", "attempt": 2}]


def test_finished_and_set_aside(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run")
    directory.create()
    assert directory.finished_step() is None
    directory.mark_finished(40)
    assert directory.finished_step() == 40
    assert directory.set_aside() == tmp_path / "run.old-1"
    directory.create()
    assert directory.set_aside() == tmp_path / "run.old-2"
    assert json.loads((tmp_path / "run.old-1" / "finished.json").read_text()) == {"step": 40}


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LaunchError, match="cannot write the run directory .*file"):
        RunDirectory(tmp_path / "file").create()


def test_the_lock_is_not_inherited_by_child_processes(tmp_path: Path) -> None:
    lock = RunLock(tmp_path)
    lock.acquire_alone(wait_s=0)
    script = "import time; print('here', flush=True); time.sleep(30)"
    child = subprocess.Popen([sys.executable, "-c", script], close_fds=False, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None and child.stdout.readline() == "here\n"
    lock.release()
    with (tmp_path / ".lock").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    child.kill()
    child.communicate()


def with_data(signature: str) -> dict:
    return {"data": {"train": [f"https://host/train/0.tar?sig={signature}", "a"]}}


def test_a_renewed_signature_is_no_changed_configuration_and_none_is_printed(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    directory.record(run=json.dumps(with_data("OLD")), ds={}, data={}, private=True)
    directory.metrics_path.write_text('{"step": 1, "loss": 2.0}\n')
    assert stat.S_IMODE((tmp_path / "config.yaml").stat().st_mode) == 0o600
    directory.check_unchanged(run=with_data("NEW"), ds={}, data={}, world_size=2, force=False)
    other = {"data": {"train": ["https://host/train/1.tar?sig=NEW", "a"]}}
    with pytest.raises(ConfigError, match=r"data.train: .*train/0.tar.* -> .*train/1.tar") as error:
        directory.check_unchanged(run=other, ds={}, data={}, world_size=2, force=False)
    assert "?sig" not in str(error.value)


def test_a_configuration_without_credentials_is_everybodys(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        (tmp_path / ".config.yaml.tmp").touch(0o600)
        RunDirectory(tmp_path).record(run="data: {}\n", ds={}, data={})
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "config.yaml").stat().st_mode) == 0o644


def test_a_run_from_before_the_objective_was_a_setting_tells_what_it_minimised(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    directory.record(run="train: {seed: 1}\n", ds={}, data={})
    directory.metrics_path.write_text('{"step": 1, "loss": 1.0}\n')

    def start(**objective: object) -> None:
        section = {"negatives": "micro", "loss": "softmax", "positives": "off"} | objective
        section = {"label_smoothing": 0.0, "hard_negative_beta": 0.0, "mlp": "auto"} | section
        directory.check_unchanged(
            run={"train": {"seed": 1}, "objective": section}, ds={}, data={}, world_size=2, force=False
        )

    start()
    with pytest.raises(ConfigError, match='objective.negatives: "micro" -> "global"\n.*objective.positives: "off" -> '):
        start(negatives="global", positives="soft")
