"""What is asked and when: a kind of workload is a file here and an entry in `options`. Begin with `plan`."""
