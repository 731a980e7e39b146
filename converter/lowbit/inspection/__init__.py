"""What a model holds, what stays in it and why, what to change, and what this machine can do."""
