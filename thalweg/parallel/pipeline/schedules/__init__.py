"""Pipeline schedules as data: actions, lowering, choice, simulation."""
