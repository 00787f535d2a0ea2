"""Speed on slow links: training loops on a really slow link, compared with the alternatives."""
