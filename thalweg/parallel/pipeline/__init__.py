"""Pipeline parallelism: schedules as data, and what runs them."""
