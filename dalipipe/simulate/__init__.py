"""What a job will do before it runs: the shipped order, cache and prefetcher on a made-up lake and made-up time."""
