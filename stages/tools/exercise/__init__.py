"""The exercise of a stage: write it, check a learner's work, prove that its steps are red and then green."""
