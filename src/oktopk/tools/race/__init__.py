"""Real training of several contenders over emulated links, to the same quality or for the same time.

contenders × links × seeds = cells       a cell is one training run in a folder of its own (spec, cells)
run ─► job (one process per rank) ─► loop ─► attach (the contender's hook on a DDP model)
compose      time to target from quality by step and step times by link
summary ─► output/       table, JSON, CSV, page and picture, from the finished cells
"""
