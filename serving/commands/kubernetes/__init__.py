"""The commands for a deployment in a Kubernetes cluster: one that writes its manifests, one that its pods run."""
