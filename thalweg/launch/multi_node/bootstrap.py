"""The first code on each host of a job that is started over ssh; run as a file, with nothing but the standard library.

    python -u bootstrap.py        its work comes as one line of JSON on standard input

Standard input and output are the line to the launcher.  Down come the job, where to meet, a sign of life
every few seconds, and perhaps a stop; its end means that the launcher is gone, and then the ranks go too.
Neither arguments nor environment ever pass through a shell.  The first line says where Thalweg is.
"""

import json
import os
import sys


def main() -> int:
    """Take the job and run it; returns this host's exit code."""
    inbox = os.fdopen(os.dup(0), "rb", buffering=0)  # reads not a byte more than the line that is asked for
    devnull = os.open(os.devnull, os.O_RDONLY)
    os.dup2(devnull, 0)
    os.close(devnull)
    message = inbox.readline()
    if not message:
        return 1
    job_message = json.loads(message)
    try:
        os.environ.update(job_message["environ"])
        os.chdir(job_message["cwd"])
        if not sys.flags.safe_path:  # the interpreter put this file's folder there
            del sys.path[0]
        sys.path.insert(0, job_message["root"])
        from thalweg.launch.local import exit_process
        from thalweg.launch.multi_node.remote_node import run_node
    except (OSError, ImportError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return exit_process(run_node(job_message, inbox))


if __name__ == "__main__":
    sys.exit(main())
