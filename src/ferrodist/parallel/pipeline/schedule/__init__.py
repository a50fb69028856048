"""What each rank does in each kind of schedule: a module for each family, with its paper and what it promises."""
