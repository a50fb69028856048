"""The secret that processes of one user share without a job secret."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from ferrodist.errors import AuthenticationError
from ferrodist.rendezvous import secret as module
from ferrodist.rendezvous.listener import Listener
from ferrodist.rendezvous.secret import user_secret


@pytest.fixture
def places(tmp_path, monkeypatch):
    """Two places for the secret, and no home."""
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        folder.mkdir()
    monkeypatch.setattr(module, "_PARENT_FOLDERS", tuple(map(str, folders)))
    monkeypatch.setattr(module.pwd, "getpwuid", lambda user: {}[user])
    return [folder / f"ferrodist-{os.geteuid()}" for folder in folders]


def test_the_user_secret_is_created_once_and_private(places):
    """The first process creates it, later ones find it, and neither file nor folder is open to others."""
    before = os.umask(0)
    try:
        secret = user_secret()
    finally:
        os.umask(before)
    assert user_secret() == secret
    assert len(secret) >= 43
    assert places[0].stat().st_mode & 0o777 == 0o700
    assert (places[0] / "secret").stat().st_mode & 0o777 == 0o600
    assert [path.name for path in places[0].iterdir()] == ["secret"]


def test_a_job_secret_comes_first(places):
    """With a job secret no file is needed."""
    Listener("127.0.0.1", 0, secret=b"s").close()
    assert not places[0].exists()


def test_many_start_at_the_same_time(places):
    """Processes that make it at the same time agree on one."""
    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(lambda _: user_secret(), range(64)))) == 1


def test_variables_do_not_change_its_path(places, monkeypatch):
    """Shells with other variables find the same secret."""
    secret = user_secret()
    for name in ("HOME", "TMPDIR", "XDG_RUNTIME_DIR", "USER"):
        monkeypatch.setenv(name, "/nowhere")
    assert user_secret() == secret


def _open_to_others(folder):
    folder.mkdir()
    folder.chmod(0o750)


def _symbolic_link(folder):
    (folder.parent / "elsewhere").mkdir(mode=0o700)
    folder.symlink_to(folder.parent / "elsewhere")


def _linked_file(folder):
    folder.mkdir(mode=0o700)
    (folder.parent / "known").write_text("k" * 43)
    (folder / "secret").symlink_to(folder.parent / "known")


def _readable_file(folder):
    folder.mkdir(mode=0o700)
    (folder / "secret").write_text("k" * 43)
    (folder / "secret").chmod(0o644)


def _short_file(folder):
    folder.mkdir(mode=0o700)
    (folder / "secret").touch(mode=0o600)


def _pipe(folder):
    folder.mkdir(mode=0o700)
    os.mkfifo(folder / "secret", 0o600)


def _folder_in_its_place(folder):
    (folder / "secret").mkdir(parents=True)
    folder.chmod(0o700)


TRAPS = [
    _open_to_others,
    _symbolic_link,
    _linked_file,
    _readable_file,
    _short_file,
    _pipe,
    _folder_in_its_place,
]


@pytest.mark.parametrize("trap", TRAPS, ids=lambda trap: trap.__name__.strip("_"))
def test_files_that_others_could_have_written_are_refused(places, trap):
    """A folder that others may read, or have created, is skipped; without another folder that is an error."""
    trap(places[0])
    assert user_secret() == (places[1] / "secret").read_bytes()
    (places[1] / "secret").unlink()
    places[1].rmdir()
    trap(places[1])
    with pytest.raises(AuthenticationError, match=r"Set FERRODIST_SECRET") as caught:
        user_secret()
    assert all(str(place) in caught.value.message for place in places)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")
@pytest.mark.parametrize("what", ["folder", "file"])
def test_files_of_another_user_are_refused(places, what):
    """A folder or a file of another user, who knows its contents, is skipped."""
    places[0].mkdir(mode=0o700)
    (places[0] / "secret").write_text("k" * 43)
    (places[0] / "secret").chmod(0o600)
    os.chown(places[0] / "secret" if what == "file" else places[0], 65534, 65534)
    assert user_secret() == (places[1] / "secret").read_bytes() != b"k" * 43


def test_an_existing_secret_takes_precedence(places):
    """If an earlier folder becomes usable later, processes still find the secret of the first ones."""
    places[0].mkdir()
    places[0].chmod(0o777)
    secret = user_secret()
    places[0].rmdir()
    assert user_secret() == secret
