"""The judge: runs anybody's program on the test cases, checks every output, ranks the programs.

rules -> submissions -> judging (-> answers, sandbox -> processes) -> results -> scoreboard -> page
"""
