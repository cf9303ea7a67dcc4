"""What follows when members come and go: the mapping that those who are left can run, who takes which rank, and what state moves."""
