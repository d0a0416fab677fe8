"""Tasks in the format of Harbor, whose rollouts run in sandboxes: `environment: harbor:FOLDER`."""
