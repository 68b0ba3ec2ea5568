package main

import "testing"

func TestATargetHasAModelAndARole(t *testing.T) {
	for want, parts := range map[string][2]string{
		"kvgrpc:///":                  {"", ""},
		"kvgrpc:///org/m":             {"org/m", ""},
		"kvgrpc:///m%20n?role=decode": {"m n", "decode"},
	} {
		if got := target(parts[0], parts[1]); got != want {
			t.Errorf("%s, not %s", got, want)
		}
	}
}
