"""Build what a release consists of, and check it. `make release-check` runs this.

1. Exports the commit HEAD twice, into two folders, and builds wheel and source distribution in
   each. Both builds must have the same bytes, and the wheel that is built from the source
   distribution must, too. SOURCE_DATE_EPOCH is the time of the commit.
2. Checks the files with `twine check --strict` and check-wheel-contents.
3. Installs the wheel into an empty environment of each Python that is found (see pythons.py), and
   runs a program that spawns actors. On a free-threaded Python the import must be refused.
4. Writes an SBOM (CycloneDX) of the wheel and its dependencies as they were installed, and the
   checksums. All is in dist/.

`VERSIONS="3.12 3.13"` chooses the Pythons, and those that are missing then fail the run.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import pythons

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
VERSIONS = (*pythons.SUPPORTED, "3.13t", "3.14t")
BIN = Path(sys.executable).parent

PROGRAM = """\
from importlib.metadata import version

import monarch
from monarch.actor import Actor, current_rank, endpoint, this_host


class Adder(Actor):
    def __init__(self, base):
        self.base = base

    @endpoint
    def add(self, x):
        return self.base + x + current_rank()["gpus"]


procs = this_host().spawn_procs({"gpus": 2})
adders = procs.spawn("adders", Adder, 10)
assert adders.add.call(1).get().values() == [11, 12]
procs.stop().get()
assert version("pymonarch") == monarch.__version__
print(monarch.__file__)
"""


def main():
    commit = git("rev-parse", "HEAD").strip()
    epoch = git("log", "-1", "--format=%ct", commit).strip()
    if git("status", "--porcelain"):
        print("note: the working tree has changes; what is checked is the commit " + commit[:12])
    with tempfile.TemporaryDirectory(prefix="pymonarch-release-") as temporary:
        folder = Path(temporary)
        artifacts = build_twice(folder, commit, epoch)
        check_files(artifacts)
        wheel = next(path for path in artifacts if path.suffix == ".whl")
        first = try_pythons(folder, wheel)
        shutil.rmtree(str(DIST), ignore_errors=True)
        DIST.mkdir()
        for path in artifacts:
            shutil.copy2(str(path), str(DIST / path.name))
        write_sbom(first, wheel, epoch)
    lines = ["{0}  {1}\n".format(digest(path), path.name) for path in sorted(DIST.iterdir())]
    (DIST / "SHA256SUMS").write_text("".join(lines))
    print("".join(lines), end="")


def build_twice(folder, commit, epoch):
    """Return wheel and source distribution, which have the same bytes in both builds."""
    builds = []
    for name in ("one", "the-other"):
        source = folder / name / "source"
        source.mkdir(parents=True)
        archive = folder / (name + ".tar")
        git("archive", "--format=tar", "--output=" + str(archive), commit)
        unpack(archive, source)
        builds.append(build(source, folder / name / "built", epoch, "-t", "sdist", "-t", "wheel"))
    if [path.name for path in builds[0]] != [path.name for path in builds[1]]:
        sys.exit("error: two builds of {0} made files of different names".format(commit))
    for path, other in zip(*builds, strict=True):
        compare(path, other, "two builds of the same commit")
    sdist, wheel = sorted(builds[0], key=lambda path: path.suffix == ".whl")
    unpacked = folder / "from-sdist"
    unpacked.mkdir()
    unpack(sdist, unpacked)
    (source,) = unpacked.iterdir()
    (again,) = build(source, folder / "rebuilt", epoch, "-t", "wheel")
    compare(wheel, again, "the wheel of the repository and that of the source distribution")
    print("reproducible: {0}, {1} (SOURCE_DATE_EPOCH={2})".format(sdist.name, wheel.name, epoch))
    return [sdist, wheel]


def build(source, target, epoch, *targets):
    environment = dict(os.environ, SOURCE_DATE_EPOCH=epoch)
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(target), *targets]
    call(command, cwd=source, env=environment)
    return sorted(target.iterdir())


def unpack(archive, target):
    with tarfile.open(str(archive)) as opened:
        opened.extractall(str(target), filter="data")


def compare(path, other, label):
    if path.read_bytes() != other.read_bytes():
        sys.exit("error: {0} differ: {1}, {2}".format(label, digest(path), digest(other)))


def check_files(artifacts):
    call([sys.executable, "-m", "twine", "check", "--strict", *map(str, artifacts)])
    wheels = [str(path) for path in artifacts if path.suffix == ".whl"]
    call([sys.executable, "-m", "check_wheel_contents", *wheels])
    print("checked: twine check --strict, check-wheel-contents")


def try_pythons(folder, wheel):
    """Install the wheel with each Python and use it; return the first environment."""
    asked = os.environ.get("VERSIONS", "").split()
    found = {version: find(version) for version in asked or VERSIONS}
    program = folder / "program.py"
    program.write_text(PROGRAM)
    first = None
    for version, python in found.items():
        if python is None:
            continue
        venv = folder / ("venv-" + version)
        call([str(python), "-m", "venv", str(venv)])
        inside = str(venv / "bin" / "python")
        call(
            [inside, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", str(wheel)],
            env=dict(os.environ, PIP_CONSTRAINT=str(ROOT / "constraints.txt")),
        )
        if version.endswith("t"):
            refuse(inside, version)
            continue
        where = call([inside, str(program)], cwd=folder).strip()
        if str(venv) not in where:
            sys.exit("error: the program ran with {0}, not with the wheel".format(where))
        call([str(venv / "bin" / "monarch"), "--help"], cwd=folder)
        first = first or venv
        print("Python {0} ({1}): installed, actors ran".format(version, python), flush=True)
    missing = [version for version, python in found.items() if python is None]
    if missing:
        print("Not installed here, so not tried: Python " + ", ".join(missing))
    if first is None or (asked and missing):
        sys.exit("error: no environment for each Python that is required")
    return first


def find(version):
    """An interpreter; `3.13t` is the free-threaded build of 3.13."""
    if not version.endswith("t"):
        return pythons.find(version)
    candidates = [*pythons.pyenv_versions().glob(version[:-1] + ".*t/bin/python")]
    candidates += filter(None, [shutil.which("python" + version)])
    return next((each for each in candidates if pythons.version_of(each) == version[:-1]), None)


def refuse(python, version):
    done = subprocess.run(
        [python, "-c", "import monarch"],
        env=dict(os.environ, PYTHON_GIL="0"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        universal_newlines=True,
        check=False,
    )
    if done.returncode == 0 or "free-threaded" not in done.stdout:
        sys.exit("error: Python {0} does not refuse the import:\n{1}".format(version, done.stdout))
    print("Python {0} ({1}): refuses the import by name".format(version, python), flush=True)


def write_sbom(venv, wheel, epoch):
    """Write the SBOM of the wheel and its dependencies: all that is left in the environment."""
    path = DIST / (wheel.name.split("-py3")[0] + ".cdx.json")
    python = str(venv / "bin" / "python")
    call([python, "-m", "pip", "uninstall", "--quiet", "--yes", "setuptools", "pip"])
    call(
        [
            *(str(BIN / "cyclonedx-py"), "environment", "--output-reproducible", "--validate"),
            *("--pyproject", str(ROOT / "pyproject.toml"), "--mc-type", "library"),
            *("--of", "JSON", "--output-file", str(path), python),
        ],
        env=dict(os.environ, SOURCE_DATE_EPOCH=epoch),
    )
    print("wrote the SBOM: dist/" + path.name)


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def git(*arguments):
    return call(["git", "-C", str(ROOT), *arguments])


def call(command, cwd=None, env=None):
    """Return what the command prints on stdout; if it fails, exit with all that it printed."""
    done = subprocess.run(
        command,
        cwd=None if cwd is None else str(cwd),
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        universal_newlines=True,
        check=False,
    )
    if done.returncode:
        sys.exit(
            "{0}{1}\nerror: exit status {2} of: {3}".format(
                done.stdout, done.stderr, done.returncode, " ".join(map(str, command))
            )
        )
    return done.stdout


if __name__ == "__main__":
    main()
