"""Hello from the pods of a Kubernetes cluster: an actor on each, by each way to get there.

The pods are created by the program (`--provision`), wait in a queue of Kueue (`--kueue`), come from
Volcano (`--volcano`), or exist already: then each runs `python -m monarch.job.pod_worker`.

    python examples/hello_kubernetes.py --provision --image registry.example.org/train:1
    python examples/hello_kubernetes.py --provision --image ... --kueue team-queue
    python examples/hello_kubernetes.py --volcano train --secret monarch
    python examples/hello_kubernetes.py --secret monarch --rdma-smoke

This is for a program in a pod of the cluster. From outside, add one of these:

    --out-of-cluster                     through `kubectl port-forward`, which the job starts
    --out-of-cluster --no-port-forward   if the addresses of pods can be dialed from here (VPN)
    --attach-to tcp://gateway.example.org:26600       through a worker that can be reached

Pods that the program has created are deleted at the end, unless `--keep` is given: then the next
run finds them, and `monarch kill` deletes them. docs/jobs/kubernetes.md has the image, the role of
the user, and the manifest of pods of your own.

Needs the client of Kubernetes: pip install 'pymonarch[kubernetes]'
"""

import argparse
import os
import platform
import sys

from monarch.actor import Actor, HostMesh, current_rank, endpoint
from monarch.rdma import RDMABuffer

try:
    from monarch.job.kubernetes import ImageSpec, KubeConfig, KubernetesJob
except RuntimeError as missing:
    sys.exit(f"error: {missing}")

MESH = "workers"


class Greeter(Actor):
    """An actor in a pod."""

    def __init__(self) -> None:
        self.memory = bytearray(b"of rank %d" % current_rank().rank)
        self.buffer = RDMABuffer(memoryview(self.memory))

    @endpoint
    def hello(self) -> str:
        pod = os.environ.get("MONARCH_POD_NAME") or platform.node()
        return (
            f"hello from rank {current_rank().rank}: pod {pod}, Python {platform.python_version()}"
        )

    @endpoint
    def give(self) -> RDMABuffer:
        return self.buffer

    @endpoint
    def read(self, other: RDMABuffer) -> str:
        """Read the memory of an actor in another pod, without a message to it."""
        memory = bytearray(other.size())
        other.read_into(memoryview(memory)).get()
        return memory.decode()


def describe(args: argparse.Namespace) -> KubernetesJob:
    outside = args.out_of_cluster or args.attach_to
    job = KubernetesJob(
        args.namespace,
        timeout=args.timeout,
        kubeconfig=KubeConfig.from_path(args.kubeconfig) if outside else None,
        attach_to=args.attach_to,
        operator=not args.no_operator,
        secret=args.secret,
        port_forward=False if args.no_port_forward else None,
    )
    if args.provision:
        # Labels of the MonarchMesh (or StatefulSet), by which Kueue admits it.
        labels = {"kueue.x-k8s.io/queue-name": args.kueue} if args.kueue else None
        job.add_mesh(MESH, args.hosts, image_spec=ImageSpec(args.image), labels=labels)
    elif args.volcano:
        selector = f"volcano.sh/job-name={args.volcano}"
        job.add_mesh(MESH, args.hosts, selector, pod_rank_label="volcano.sh/task-index")
    else:
        job.add_mesh(MESH, args.hosts)
    return job


def greet(hosts: HostMesh, *, rdma: bool) -> int:
    greeters = hosts.spawn_procs().spawn("greeters", Greeter)
    print(*greeters.hello.call().get().values(), sep="\n")
    if not rdma:
        return 0
    buffers = list(greeters.give.call().get().values())
    for rank, buffer in enumerate(buffers):
        reader = (rank + 1) % len(buffers)
        found = greeters.slice(hosts=reader).read.call_one(buffer).get()
        print(f"rank {reader} has read the memory {found}")
        if found != f"of rank {rank}":
            return 1
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Say hello from the pods of a cluster.")
    parser.add_argument("--namespace", default="default", help="of the pods (default: default)")
    parser.add_argument("--hosts", type=int, default=2, help="pods (default: 2)")
    parser.add_argument("--timeout", type=int, metavar="S", help="until they are ready")
    parser.add_argument("--provision", action="store_true", help="create the pods")
    parser.add_argument("--image", help="of pods to create: python with pymonarch")
    parser.add_argument("--no-operator", action="store_true", help="the cluster has no MonarchMesh")
    parser.add_argument("--kueue", metavar="QUEUE", help="have Kueue admit the created pods")
    parser.add_argument("--volcano", metavar="JOB", help="attach to the pods of this Volcano job")
    parser.add_argument("--secret", metavar="NAME", help="the Secret object of pods that exist")
    parser.add_argument("--out-of-cluster", action="store_true", help="this program is in no pod")
    path = os.environ.get("KUBECONFIG") or "~/.kube/config"
    parser.add_argument("--kubeconfig", default=path, help="file (default: %(default)s)")
    parser.add_argument("--no-port-forward", action="store_true", help="dial the pods directly")
    parser.add_argument(
        "--attach-to", metavar="ADDRESS", help="of a worker that leads to the others"
    )
    parser.add_argument("--rdma-smoke", action="store_true", help="read memory of the next pod")
    parser.add_argument("--keep", action="store_true", help="do not delete the created pods")
    args = parser.parse_args()
    if args.hosts < 1:
        parser.error("--hosts must be at least 1")
    if args.provision and not args.image:
        parser.error("--provision needs the --image of the pods")
    if args.kueue and not args.provision:
        parser.error("--kueue is for pods that are created: --provision")
    if args.provision and args.volcano:
        parser.error("--volcano attaches to pods that exist; leave --provision out")

    try:
        job = describe(args)
        hosts = getattr(job.state(), MESH)
        try:
            return greet(hosts, rdma=args.rdma_smoke)
        finally:
            if args.provision and not args.keep:
                job.kill()
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
