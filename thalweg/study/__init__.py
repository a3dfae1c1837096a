"""The study: what an optimisation is worth, in time, memory, quality and money, on your models, data and machine.

    study.yaml  ->  config      models x datasets x techniques x hardware, checked at once
                    schemas     which columns of a dataset are what
                    prepare     datasets to ``input``/``output`` rows, models to folders, label counts, lengths
                    run         groups of cells; in each, rounds of fresh processes that take turns
                    cell        one process: load, warm up, measure, one JSON file
                    techniques  what a cell does for inference;  training: for fine-tuning
                    report      medians, intervals, the null comparison, why; JSON, Markdown, one HTML page

A *cell* is one model, dataset, technique and hardware setting.  It is measured in ``rounds`` processes; within a
round the cells of a group (the same model, dataset, hardware and task) run one after the other in an order that
rotates, so a slow minute of the machine falls on all of them.  Ratios are of medians within a round.  The first
technique of a task is its baseline and is measured a second time under another name: how far that ratio is from 1 is
what the machine's noise amounts to.

Invariants: a file of the output folder is published by rename, so that a study that was killed goes on where it was;
a cell that fails is a row with the reason, never the end of the study.
"""
