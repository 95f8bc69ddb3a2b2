"""What each side of a KV handoff does when a message comes, or none comes any more. Begin with `messages`."""
