"""The judge: runs anybody's program on the test cases, checks every output, ranks the programs.

rules -> submissions -> judging (-> inputs -> answers) -> results -> scoreboard -> page -> views
                 sandbox -> supervision -> supervisor, a process of its own (-> containment, bubblewrap)
"""
