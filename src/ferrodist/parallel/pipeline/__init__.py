"""Pipeline parallelism: a model in stages, each on a rank of its own, through which microbatches flow."""
