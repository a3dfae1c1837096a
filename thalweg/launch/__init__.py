"""Starting a job: one script, several ranks, on this host or several.

Three kinds of process take part:

    thalweg run  (one a host)  torch's elastic agent: one child for each rank, the first failure ends the job;
                        ``local.py`` drives it, ``elastic_agent.py`` makes it quick, ``rendezvous.py`` lets it meet the
                        agents of other hosts and end with them
    worker.py    (N)    the first code of each rank: ties its life to the launcher's, takes its cores, then
                        becomes the script; it loads nothing but the standard library
    the script   (N)    the same N processes; RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and so on are set

Invariants:

- No shell anywhere, and the arguments arrive byte for byte.
- The job ends when its first rank fails, with that rank's exit code (128 + n for signal n) and that rank's
  traceback, once.  A rank that fails because its peer went away is never called the first.
- With ``--max-restarts`` that is the end of one start, and the next one has nothing of it: new ranks, a new or emptied
  store.  Whoever stops the launcher stops the job, whatever it is doing.
- When the launcher is gone, however it went, so are the ranks; processes are ended by pid or by the session
  that the launcher gave a rank, never by name.
- What the launcher leaves on disk is one folder of mode 0700 with a random name, removed at the end.

``spec.py`` is what the user asked for, ``hostfile.py`` reads hostfiles and filters, ``cpu_affinity.py`` shares the
processor out, ``failure.py`` finds the first failure.  ``multi_node/ssh.py`` starts ``bootstrap.py`` on each host of a
job, which becomes a ``thalweg run`` of that host (``remote_node.py``); ``static_nodes.py`` is the same started by
hand; ``schedulers.py`` leaves it all to srun or mpirun.
"""
