"""Native file formats: files that can be mapped column by column."""
