"""What writes numbers and tables into the README files. It reads stages/bench/results.json and measures nothing."""
