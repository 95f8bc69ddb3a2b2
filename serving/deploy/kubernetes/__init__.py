"""A deployment as Kubernetes manifests, from the configuration that `moonshard serve` reads.

Pure: from a `deployment.Deployment` to plain objects, which `files` writes; nothing here talks to a cluster. Begin with
`files`, which lists what there is; `faults` says what cannot run in pods, by its key. Workers are LeaderWorkerSets, for
a worker may be a gang of processes; the command is `commands.kubernetes.manifests`.
"""
