"""Scripts and manifests of `deploy/`: linted, and read as tfamp reads what they set."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tfamp.machine.clusters import cluster_of

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "deploy"
SLURM = FOLDER / "slurm.sbatch"
# Two nodes; the first task of the first start fails, as a crash would have it.
SRUN = f"""#!/bin/bash
while [[ $1 == --* ]]; do echo "$1" >> arguments; shift; done
starts=$(cat starts 2>/dev/null || echo 0); echo $((starts + 1)) > starts
if [ "$starts" -lt "$CRASHES" ]; then exit 137; fi
export SLURM_STEP_NODELIST='n[1-2]' SLURM_STEP_TASKS_PER_NODE='4(x2)'
export SLURM_STEP_NUM_TASKS=8 SLURM_PROCID=5 SLURM_NODEID=1
export PYTHONPATH={ROOT}
"$@"
"""
SHOW = (
    "import tfamp; c = tfamp.distribute.cluster(); "
    "print(c.source, c.num_workers, c.index)"
)


def run_script(folder, crashes, *command):
    """Runs the script of Slurm with a stand-in for `srun`."""
    srun = folder / "srun"
    srun.write_text(SRUN)
    srun.chmod(0o755)
    return subprocess.run(
        ["bash", str(SLURM), *command],
        cwd=folder,
        env={
            **os.environ,
            "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
            "CRASHES": str(crashes),
            "SLURM_JOB_ID": "7",
            "SLURM_NTASKS": "8",
        },
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.slow("it starts processes")
def test_the_script_of_slurm_starts_workers_again_that_read_their_cluster(tmp_path):
    done = run_script(tmp_path, 1, sys.executable, "-c", SHOW)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "Slurm 8 5\n"
    assert "Start 1 of 5 ended before its time." in done.stderr
    assert (tmp_path / "starts").read_text() == "2\n"
    arguments = (tmp_path / "arguments").read_text().split()
    assert {"--kill-on-bad-exit=1", "--distribution=block"} <= set(arguments)


def test_scripts_pass_shellcheck():
    beside = Path(sys.executable).with_name("shellcheck")
    shellcheck = str(beside) if beside.exists() else shutil.which("shellcheck")
    if shellcheck is None:
        pytest.skip("needs shellcheck, of the extra `dev`")
    subprocess.run([shellcheck, str(SLURM)], check=True, timeout=60)


def manifests(name):
    yaml = pytest.importorskip("yaml", reason="of the extra `dev`")
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def test_pods_of_the_indexed_job_read_their_cluster():
    service, job = manifests("kubernetes.yaml")
    spec, name = job["spec"], job["metadata"]["name"]
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    bash, option, script = container["command"]
    script = script.replace("exec python", "printenv TF_CONFIG #")
    for index in range(spec["completions"]):
        # What Kubernetes sets, and the name under which a pod of the job is found.
        config = subprocess.run(
            [bash, option, script],
            env={**os.environ, "JOB_COMPLETION_INDEX": str(index)},
            capture_output=True,
            text=True,
        ).stdout
        cluster = cluster_of({"TF_CONFIG": config})
        assert cluster.num_workers == spec["completions"]
        port = container["ports"][0]["containerPort"]
        address = cluster.workers[cluster.index]
        assert address == f"{name}-{index}.{pod['subdomain']}:{port}"
    assert service["metadata"]["name"] == pod["subdomain"]
    labels = spec["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
