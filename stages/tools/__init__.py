"""The tools of the course, standard library and git only: the chain of stages, its exercises, its prose."""
