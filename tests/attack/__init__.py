"""An attack on a store, from all sides at once, in which every row that anyone sees is checked.

::

    machine    sends signals, kills and starts anew, and says what went wrong
    trainer    owns the buffer: changes it in every way, in every kind of thread
    readers    follow the store and sit on a checkpoint that is saved over
    process    what all attacked processes have: signals, a crew of threads, a watchdog, figures
    model      what the store may hold, and what of it must survive
    board      memory that processes share, and that outlives them
    rows       what is in a trajectory, and whether what is drawn is right

`test_attack` runs it for seconds, and in its long form for an hour.
"""
