"""The policy benchmark (`ampdctl bench policies`): every policy in every cell, by simulation.

`cells` and `contenders` say what is compared, `study` which runs that takes (with `search` and
`plans`), `statistics` what they come to; all of it pure. `execute` simulates a run, `journal`
keeps what was run, `drive` brings the two together; `report` and `plots` show the result.
"""
