package atls

import (
	"bytes"
	"errors"
	"io"
	"testing"
	"testing/iotest"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"pgregory.net/rapid"

	attestv1 "github.com/muster-k8s/muster/gen/muster/attest/v1"
	"github.com/muster-k8s/muster/trust/attest"
)

const frameInvalid = attestv1.Reason_REASON_FRAME_INVALID

func noLimit(int64) error { return nil }

func marshalled(t *testing.T, f *attestv1.Frame) []byte {
	t.Helper()
	b, err := proto.Marshal(f)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func evidenceOf(log int) *attestv1.Frame {
	return evidenceFrame(&attestv1.Evidence{Format: attestv1.Format_FORMAT_TPM2, Body: &attestv1.Evidence_Tpm2{
		Tpm2: &attestv1.Tpm2Evidence{Events: make([]byte, log)},
	}})
}

func TestFramesThatAreNotAsSpecifiedAreRefused(t *testing.T) {
	accepted := marshalled(t, verdictFrame(&attestv1.Verdict{Reason: attestv1.Reason_REASON_ACCEPTED}))
	manyFormats := make([]attestv1.Format, maxFormats+1)
	for i := range manyFormats {
		manyFormats[i] = attestv1.Format_FORMAT_TPM2
	}
	emptyPCRs := protowire.AppendTag(nil, 2, protowire.BytesType) // Evidence.tpm2
	emptyPCRs = protowire.AppendBytes(emptyPCRs, bytes.Repeat([]byte{6<<3 | 2, 0}, maxFields+1))
	nested := func(field int32, n int) []byte { // a list in a message in Evidence.tpm2
		b := protowire.AppendBytes(protowire.AppendTag(nil, protowire.Number(field), protowire.BytesType), bytes.Repeat([]byte{1<<3 | 2, 0}, n))
		b = protowire.AppendBytes(protowire.AppendTag(nil, 2, protowire.BytesType), b)
		return lengthPrefixed(protowire.AppendBytes(protowire.AppendTag(nil, 2, protowire.BytesType), b))
	}
	for name, tt := range map[string]struct {
		raw   []byte
		limit int
		want  attestv1.Reason
	}{
		"no message at all":                       {raw: lengthPrefixed(nil)},
		"a message of a later version alone":      {raw: lengthPrefixed([]byte{15<<3 | 2, 0})},
		"not protobuf":                            {raw: lengthPrefixed([]byte{0xff, 0xff, 0xff})},
		"two messages":                            {raw: lengthPrefixed(append(bytes.Clone(accepted), marshalled(t, responseFrame(make([]byte, 32)))...))},
		"the same message twice":                  {raw: lengthPrefixed(append(bytes.Clone(accepted), accepted...))},
		"a length of four gigabytes":              {raw: []byte{0xff, 0xff, 0xff, 0xff}},
		"a length of one more than may come":      {raw: []byte{0, 1, 0, 1}},
		"a length of one more than evidence has":  {raw: []byte{0, 0x10, 0, 1}, limit: maxEvidenceFrame},
		"half a length":                           {raw: []byte{0, 0}},
		"a body that ends early":                  {raw: lengthPrefixed(accepted)[:4+len(accepted)-1]},
		"an offer of too many formats":            {raw: lengthPrefixed(marshalled(t, offerFrame(&attestv1.Offer{Gives: manyFormats})))},
		"an offer that accepts too many formats":  {raw: lengthPrefixed(marshalled(t, offerFrame(&attestv1.Offer{Accepts: manyFormats})))},
		"a response as long as evidence":          {raw: lengthPrefixed(marshalled(t, responseFrame(make([]byte, maxFrame+1)))), limit: maxEvidenceFrame},
		"evidence of more than 64 KiB not due":    {raw: lengthPrefixed(marshalled(t, evidenceOf(maxFrame+1)))},
		"a list that would take more than it has": {raw: lengthPrefixed(protowire.AppendBytes(protowire.AppendTag(nil, 2, protowire.BytesType), emptyPCRs))},
		"a list in a platform key that would":     {raw: nested(12, maxFields)},
		"a hardware report of too many fields":    {raw: nested(13, maxFields)},
		"a platform key's list that is allowed":   {raw: nested(12, maxFields-3), want: attestv1.Reason_REASON_ACCEPTED},
		"a hardware report that is allowed":       {raw: nested(13, maxFields-3), want: attestv1.Reason_REASON_ACCEPTED},
		"a nested message that ends early":        {raw: lengthPrefixed([]byte{2<<3 | 2, 2, 2<<3 | 2, 200})},

		"the offer repaired":        {raw: lengthPrefixed(marshalled(t, offerFrame(&attestv1.Offer{Gives: manyFormats[1:], Accepts: manyFormats[1:]}))), want: attestv1.Reason_REASON_ACCEPTED},
		"one message":               {raw: lengthPrefixed(accepted), want: attestv1.Reason_REASON_ACCEPTED},
		"a field of a later frame":  {raw: lengthPrefixed(append(bytes.Clone(accepted), 15<<3|2, 0)), want: attestv1.Reason_REASON_ACCEPTED},
		"evidence of 64 KiB":        {raw: lengthPrefixed(marshalled(t, evidenceOf(maxFrame-100))), want: attestv1.Reason_REASON_ACCEPTED},
		"evidence of almost 1 MiB":  {raw: lengthPrefixed(marshalled(t, evidenceOf(maxEvidenceFrame-100))), limit: maxEvidenceFrame, want: attestv1.Reason_REASON_ACCEPTED},
		"an offer of other formats": {raw: lengthPrefixed(marshalled(t, offerFrame(&attestv1.Offer{Gives: []attestv1.Format{400}}))), want: attestv1.Reason_REASON_ACCEPTED},
	} {
		t.Run(name, func(t *testing.T) {
			if tt.limit == 0 {
				tt.limit = maxFrame
			}
			if tt.want == attestv1.Reason_REASON_UNSPECIFIED {
				tt.want = frameInvalid
			}
			// One byte at a time: frames do not depend on how they arrive.
			r := bytes.NewReader(append(bytes.Clone(tt.raw), "PRI * HTTP/2.0"...))
			if tt.want != attestv1.Reason_REASON_ACCEPTED {
				r = bytes.NewReader(tt.raw)
			}
			_, _, err := readFrame(iotest.OneByteReader(r), tt.limit, noLimit)
			if got := attest.ReasonOf(err); got != tt.want {
				t.Fatalf("%v, want %v", err, tt.want)
			}
			if rest, _ := io.ReadAll(r); tt.want == attestv1.Reason_REASON_ACCEPTED && string(rest) != "PRI * HTTP/2.0" {
				t.Errorf("%q is left, want all of what HTTP/2 sent", rest)
			}
		})
	}
}

func TestAnEndBetweenFramesIsNoRefusal(t *testing.T) {
	_, _, err := readFrame(bytes.NewReader(nil), maxFrame, noLimit)
	if !errors.Is(err, errHungUp) {
		t.Fatalf("%v, want %v", err, errHungUp)
	}
}

func TestAPromisedLengthTakesNoMemory(t *testing.T) {
	promise := []byte{0, 0x10, 0, 0} // 1 MiB, of which only a few bytes follow
	got := testing.AllocsPerRun(100, func() {
		_, raw, err := readFrame(io.MultiReader(bytes.NewReader(promise), bytes.NewReader([]byte("ab"))), maxEvidenceFrame, noLimit)
		if attest.ReasonOf(err) != frameInvalid || cap(raw) > maxFrame {
			t.Fatalf("%v, %d bytes held", err, cap(raw))
		}
	})
	if got > 40 {
		t.Errorf("%v allocations", got)
	}
}

func TestOnlyLargeFramesAskForAPlace(t *testing.T) {
	busy := attest.Refuse(attestv1.Reason_REASON_BUSY, "no place")
	refuse := func(int64) error { return busy }
	small := lengthPrefixed(marshalled(t, evidenceOf(maxSmallEvidence-100)))
	if _, _, err := readFrame(bytes.NewReader(small), maxEvidenceFrame, refuse); err != nil {
		t.Errorf("a small frame: %v", err)
	}
	large := lengthPrefixed(marshalled(t, evidenceOf(maxSmallEvidence+1)))
	if _, _, err := readFrame(bytes.NewReader(large), maxEvidenceFrame, refuse); !errors.Is(err, busy) {
		t.Errorf("a large frame: %v, want %v", err, busy)
	}
}

func TestFramesComeBackAsTheyWere(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		formats := rapid.SliceOfN(rapid.Map(rapid.Int32Range(1, 1000), func(n int32) attestv1.Format { return attestv1.Format(n) }), 0, maxFormats)
		f := rapid.OneOf(
			rapid.Custom(func(t *rapid.T) *attestv1.Frame {
				return offerFrame(&attestv1.Offer{Gives: formats.Draw(t, "gives"), Accepts: formats.Draw(t, "accepts")})
			}),
			rapid.Custom(func(t *rapid.T) *attestv1.Frame {
				return responseFrame(rapid.SliceOfN(rapid.Byte(), 0, 64).Draw(t, "mac"))
			}),
			rapid.Custom(func(t *rapid.T) *attestv1.Frame { return evidenceOf(rapid.IntRange(0, 200000).Draw(t, "log")) }),
		).Draw(t, "frame")
		raw, err := encodeFrame(f)
		if err != nil {
			t.Fatal(err)
		}
		got, same, err := readFrame(bytes.NewReader(raw), maxEvidenceFrame, noLimit)
		if err != nil || !proto.Equal(got, f) || !bytes.Equal(same, raw) {
			t.Fatalf("%v came back as %v, %v", f, got, err)
		}
	})
}

func FuzzDecodeFrame(f *testing.F) {
	for _, frame := range []*attestv1.Frame{
		offerFrame(&attestv1.Offer{Gives: []attestv1.Format{1}, Accepts: []attestv1.Format{1, 300}}),
		evidenceOf(100),
		challengeFrame(&attestv1.Challenge{CredentialBlob: []byte("blob"), EncryptedSecret: []byte("secret")}),
		responseFrame(make([]byte, 32)),
		verdictFrame(&attestv1.Verdict{Reason: attestv1.Reason_REASON_BUSY}),
	} {
		b, err := proto.Marshal(frame)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Add([]byte{2<<3 | 2, 2, 2<<3 | 2, 200})
	f.Fuzz(func(t *testing.T, body []byte) {
		frame, err := decodeFrame(body)
		if err != nil {
			if attest.ReasonOf(err) != frameInvalid {
				t.Fatalf("%v is no %v", err, frameInvalid)
			}
			return
		}
		if frame.GetMessage() == nil {
			t.Fatal("accepted without a message")
		}
		if frame.GetEvidence() == nil && len(body) > maxFrame {
			t.Fatal("accepted though too long")
		}
		if n := len(frame.GetEvidence().GetTpm2().GetPcrs()); n > maxFields {
			t.Fatalf("accepted a list of %d", n)
		}
		// An accepted frame can be encoded again, with the same meaning.
		again, err := encodeFrame(frame)
		if err != nil {
			t.Fatal(err)
		}
		back, err := decodeFrame(again[4:])
		if err != nil || !proto.Equal(back, frame) {
			t.Fatalf("%v came back as %v, %v", frame, back, err)
		}
	})
}
