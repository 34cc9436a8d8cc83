package atls

import "testing"

func TestLimitsHaveDefaults(t *testing.T) {
	want := Limits{
		SetUp: 256, SetUpPerSource: 64, Open: 128, OpenPerSource: 16, Attested: 512, AttestedPerMachine: 8, Rate: 16, Burst: 64, Total: 128,
		Bytes: 16 << 20, BytesPerSource: 4 << 20, AttestedBytes: 16 << 20, AttestedBytesPerMachine: 2 << 20, ConnBytes: 32 << 10, PlainBytes: 16 << 10, ConnCalls: 32,
	}
	if got := (Limits{}).withDefaults(); got != want {
		t.Errorf("%+v, want %+v", got, want)
	}
}
