"""Write measured numbers and tables into the README files. Reads stages/bench/results.json, and measures nothing."""
