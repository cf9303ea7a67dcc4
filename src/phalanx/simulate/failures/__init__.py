"""How failures and slow hosts change the progress of a job."""
