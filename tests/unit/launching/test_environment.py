"""Variables on their way to other hosts: through DeepSpeed's quoting, pdsh's % and a shell, and past the log."""

from __future__ import annotations

import json
import re
import stat
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clap_zero.errors import LaunchError
from clap_zero.launching import environment
from clap_zero.launching.environment import Variable, is_secret, pack


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home and an empty working directory, without variables of ours."""
    (tmp_path / "home").mkdir()
    (tmp_path / "work").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("DS_ENV_FILE", raising=False)
    monkeypatch.delenv(environment.FORWARD, raising=False)
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "home"


def arrived(line: str) -> str:
    """What becomes of a line of DeepSpeed's file on the other host: `add_export`, pdsh, sh."""
    key, value = line.split("=", maxsplit=1)
    value = value.strip()
    if re.search(r"[^\w@%+=:,./-]", value):
        value = f'"{value}"'
    command = f"export {key}={value}; ".replace("%%", "\0").replace("%h", "HOST").replace("%n", "0").replace("\0", "%")
    shown = subprocess.run(["sh", "-c", command + f'printf %s "${key}"'], capture_output=True, check=True)
    return shown.stdout.decode()


@pytest.mark.parametrize(
    "value",
    ["offline", "a b\"c'", "$HOME `id` $(id)", "50%h %n %%", "\\", '\\"', "", "ä=ö", "a;b&c|d>e", "!x", "~/x", "*"],
)
def test_l07_values_arrive_unchanged(value: str) -> None:
    baggage = pack({"X": Variable(value)}, shell=True)
    assert arrived(f"X={baggage.shown['X']}\n") == value


@settings(max_examples=60)
@given(value=st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=15))
def test_l07_any_value_arrives_one_way_or_the_other(value: str) -> None:
    baggage = pack({"X": Variable(value)}, shell=True)
    if "X" in baggage.private:
        assert baggage.private["X"] == value
    else:
        assert arrived(f"X={baggage.shown['X']}\n") == value


def test_a_reference_in_the_file_is_filled_in_on_the_other_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BASE", "/there")
    shown = pack({"X": Variable('${BASE}/a "b" $(id) 5$', expands=True)}, shell=True).shown
    assert arrived(f"X={shown['X']}") == '/there/a "b" $(id) 5$'


@pytest.mark.parametrize(
    "name",
    [
        *("WANDB_API_KEY", "HF_TOKEN", "AWS_PROFILE", "MY_PASSWORD", "client_secret", "GOOGLE_APPLICATION_CREDENTIALS"),
        *("SSH_PASSPHRASE", "MYSQL_PWD", "GITHUB_PAT", "PROXY_AUTH", "SENTRY_DSN", "SESSION_COOKIE"),
    ],
)
def test_l07_secrets_go_through_the_private_file(name: str) -> None:
    assert is_secret(name)
    assert pack({name: Variable("s3cret")}, shell=True) == environment.Baggage({}, {name: "s3cret"})


def test_a_password_in_an_address_is_a_secret_and_a_tokenizer_is_not() -> None:
    for address in ("http://me:pw@proxy:3128", "http://T0KEN@proxy:3128", "https://u:a/b@h"):
        assert is_secret("HTTPS_PROXY", address)
    assert not is_secret("HTTPS_PROXY", "http://proxy:3128")
    assert not is_secret("INDEX", "https://host/path?mail=a@b")
    assert not is_secret("TOKENIZERS_PARALLELISM", "false")


def test_mpirun_and_srun_get_only_what_their_command_lines_carry() -> None:
    variables = {
        name: Variable(value) for name, value in {"A": "1", "B": "a b", "NCCL_IB_HCA": "mlx5_0,mlx5_1"}.items()
    }
    baggage = pack(variables, shell=False)
    assert baggage.shown == {"A": "1"}
    assert baggage.private == {"B": "a b", "NCCL_IB_HCA": "mlx5_0,mlx5_1"}


def test_l07_both_files_are_read_and_blanks_and_comments_dropped(home: Path) -> None:
    (home / ".deepspeed_env").write_text("# mine\n\nA=home\nB=home\n")
    Path(".deepspeed_env").write_text('B=work "x" = y\n  # c\n')
    assert {name: one.value for name, one in environment.read_env_files().items()} == {"A": "home", "B": 'work "x" = y'}


def test_l07_a_bad_line_is_named_and_not_shown(home: Path) -> None:
    (home / ".deepspeed_env").write_text("A=1\nexport WANDB_API_KEY=s3cret\n")
    with pytest.raises(LaunchError) as caught:
        environment.read_env_files()
    assert str(caught.value) == f"{home}/.deepspeed_env:2: this line is not of the form NAME=value; nothing was started"


def test_l07_listed_variables_travel_and_others_stay(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_MODE", "HF_HOME", "NCCL_DEBUG", "CLAP_ZERO_EXIT_CODES", "CUDA_VISIBLE_DEVICES", "X", "Y"):
        monkeypatch.setenv(name, "v")
    monkeypatch.setenv(environment.FORWARD, "X")
    found = environment.gather()
    assert {"WANDB_MODE", "HF_HOME", "NCCL_DEBUG", "CLAP_ZERO_EXIT_CODES", "X"} <= found.keys()
    assert not {"CUDA_VISIBLE_DEVICES", "Y", environment.FORWARD} & found.keys()
    monkeypatch.setenv(environment.FORWARD, "X,NOWHERE")
    with pytest.raises(LaunchError, match="names NOWHERE, which is not set here"):
        environment.gather()


def test_the_private_file_is_private_and_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stale = tmp_path / f".variables-{environment.socket.gethostname()}-x.json"
    stale.write_text("{}")
    path = environment.write_private({"A_KEY": 'x "\n'}, tmp_path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert json.loads(path.read_text()) == {"A_KEY": 'x "\n'}
    assert not stale.exists(), "its launcher is gone"
    monkeypatch.setenv(environment.PRIVATE_FILE, str(path))
    monkeypatch.setenv("A_KEY", "")
    environment.restore()
    assert environment.os.environ["A_KEY"] == 'x "\n'
    assert environment.PRIVATE_FILE not in environment.os.environ


def test_a_host_that_does_not_see_the_file_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(environment.PRIVATE_FILE, "/nope")
    monkeypatch.setenv(environment.PRIVATE_NAMES, "A_KEY,B_TOKEN")
    environment.restore()
    assert capfd.readouterr().err.startswith("clap_zero: warning: A_KEY, B_TOKEN did not reach ")
