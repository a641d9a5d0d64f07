"""The laboratory: tasks, rewards, evaluation, recipes and runs on top of the method, and the command `troll`.

It needs more packages than the method does: `pip install "troll-rl[trl,tasks,report]"`. Its rooms are imported by name,
e.g. `troll_lab.rewards`; nothing in `troll` or `troll_sandbox` imports from here.
"""
