from __future__ import annotations

from pathlib import Path

import pytest

from tests.fake_nsys import make_fake_nsys
from workbench.nsys_tool import NSYS_VARIABLE, Nsys, NsysError, capture_flags, find_nsys


def program(path: Path, body: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
    path.chmod(0o755)
    return path


@pytest.fixture
def nothing_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine's root without Nsight Systems, not on the PATH and named by nobody."""
    monkeypatch.delenv(NSYS_VARIABLE, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return tmp_path


class TestFinding:
    def test_takes_the_one_on_the_path(self, nothing_installed: Path) -> None:
        found = program(nothing_installed / "bin" / "nsys")

        assert find_nsys(root=nothing_installed).path == found

    def test_takes_the_one_that_is_named_before_it(
        self, nothing_installed: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        program(nothing_installed / "bin" / "nsys")
        named, given = program(nothing_installed / "named"), program(nothing_installed / "given")
        monkeypatch.setenv(NSYS_VARIABLE, str(named))

        assert find_nsys(root=nothing_installed).path == named
        assert find_nsys(str(given), root=nothing_installed).path == given

    @pytest.mark.parametrize(
        "place",
        [
            "opt/nvidia/nsight-systems/2025.3.1/bin/nsys",
            "opt/nvidia/nsight-systems-cli/2025.3.1/bin/nsys",
            "usr/local/cuda-13.0/bin/nsys",
            "opt/nsys-2023/usr/lib/x86_64-linux-gnu/nsight-systems/target-linux-x64/nsys",
        ],
    )
    def test_looks_where_it_usually_is(self, nothing_installed: Path, place: str) -> None:
        found = program(nothing_installed / place)

        assert find_nsys(root=nothing_installed).path == found

    def test_takes_the_newest(self, nothing_installed: Path) -> None:
        for version in ("2024.6.2", "2025.3.1", "2023.4.4"):
            program(nothing_installed / f"opt/nvidia/nsight-systems/{version}/bin/nsys")

        assert "2025.3.1" in find_nsys(root=nothing_installed).path.parts

    @pytest.mark.parametrize(
        ("pattern", "older", "newer"),
        [
            ("opt/nvidia/nsight-systems/{}/bin/nsys", "2024.9.1", "2024.10.1"),
            ("usr/local/cuda-{}/bin/nsys", "9.2", "13.0"),
        ],
    )
    def test_versions_are_numbers_and_no_text(
        self, nothing_installed: Path, pattern: str, older: str, newer: str
    ) -> None:
        program(nothing_installed / pattern.format(older))
        found = program(nothing_installed / pattern.format(newer))

        assert find_nsys(root=nothing_installed).path == found

    def test_finds_nothing_where_there_is_none_and_says_what_to_do(self, nothing_installed: Path) -> None:
        with pytest.raises(NsysError, match=r"is not here; install NVIDIA Nsight Systems .*WORKBENCH_NSYS="):
            find_nsys(root=nothing_installed)


class TestCommandLine:
    def test_records_only_our_capture_range_and_kills_nothing_at_its_end(self) -> None:
        flags = capture_flags(("nvtx", "cuda"))

        assert {"--capture-range=nvtx", "--nvtx-capture=capture@engine", "--trace=nvtx,cuda"} <= set(flags)
        assert {"--capture-range-end=stop", "--kill=none"} <= set(flags)

    def test_stands_before_the_program(self) -> None:
        command = Nsys(Path("/opt/nsys")).profile_command(Path("report"), trace=("nvtx",), flags=["--stats=true"])

        assert command[:2] == ["/opt/nsys", "profile"]
        assert command[-3:] == ["--stats=true", "--force-overwrite=true", "--output=report"]


class TestCalls:
    def test_version_is_the_number_alone(self, tmp_path: Path) -> None:
        assert Nsys(make_fake_nsys(tmp_path)).version() == "2099.1.1"

    def test_a_failing_tool_is_told_with_its_last_words(self, tmp_path: Path) -> None:
        nsys = Nsys(program(tmp_path / "nsys", "echo first >&2; echo the licence has expired >&2; exit 4"))

        with pytest.raises(NsysError, match="nsys failed with status 4: the licence has expired"):
            nsys.export(tmp_path / "report.nsys-rep")

    def test_a_tool_that_exports_nothing_is_told(self, tmp_path: Path) -> None:
        with pytest.raises(NsysError, match="made no export"):
            Nsys(program(tmp_path / "nsys")).export(tmp_path / "report.nsys-rep")

    def test_what_is_no_program_is_told(self, tmp_path: Path) -> None:
        broken = tmp_path / "nsys"
        broken.write_bytes(b"\x7fELF")
        broken.chmod(0o755)

        with pytest.raises(NsysError, match="nsys cannot be run"):
            Nsys(broken).version()

    @pytest.mark.parametrize(
        "host", ["host-linux-x64", "usr/lib/nsight-systems/host-linux-x64"], ids=["beside it", "Debian's"]
    )
    def test_a_recording_is_imported_before_it_is_exported(self, tmp_path: Path, host: str) -> None:
        nsys = program(
            tmp_path / "usr/lib/x86_64-linux-gnu/nsight-systems/target/nsys"
            if "usr" in host
            else tmp_path / "bin/nsys",
            'for a; do case "$a" in --output=*) echo made > "${a#--output=}";; esac; done',
        )
        program(tmp_path / host / "QdstrmImporter", 'echo "$LD_LIBRARY_PATH" > "$4"')
        recording = tmp_path / "report.1.qdstrm"
        recording.touch()

        assert Nsys(nsys).export(recording) == tmp_path / "report.1.sqlite"
        assert (tmp_path / "report.1.nsys-rep").read_text(encoding="utf-8").strip() == str(tmp_path / host)

    def test_a_recording_without_an_importer_is_told(self, tmp_path: Path) -> None:
        with pytest.raises(NsysError, match="QdstrmImporter, a part of nsys's host package, is missing"):
            Nsys(program(tmp_path / "nsys")).export(tmp_path / "report.qdstrm")
