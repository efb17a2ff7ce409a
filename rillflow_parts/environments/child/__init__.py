"""Files that a child process loads by their path; no module beside them hides one of the user's."""
