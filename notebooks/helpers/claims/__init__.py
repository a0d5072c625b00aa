"""What claims.ipynb is made of: a file for each subject, each with what it counts and the findings that follow."""
