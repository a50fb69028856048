"""Pipeline schedules as data: a module for each family, with its paper, its bubble and its memory."""
