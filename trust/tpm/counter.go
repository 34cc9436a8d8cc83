package tpm

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"

	gotpm "github.com/google/go-tpm/tpm2"
)

// CounterIndex is the NV index of the counter that identifies the newest state of the disk (B7).
// 0x01800000 to 0x01BFFFFF are for the owner's indices (TCG Registry of Reserved TPM 2.0 Handles
// and Localities, section 2.2).
const CounterIndex = gotpm.TPMHandle(0x01804D55)

var (
	// ErrNoCounter means that the TPM has no counter at [CounterIndex], or one that was never
	// incremented.
	ErrNoCounter = errors.New("the TPM has no counter")
	// ErrForeignCounter means that [CounterIndex] holds something other than Muster's counter,
	// possibly an index that can be set to any value.
	ErrForeignCounter = errors.New("the TPM has something else where Muster's counter should be")
)

// counterTemplate is the public area of the counter (Part 2, 13.4, TPMS_NV_PUBLIC). Its auth value
// is empty, and it is not orderly: the TPM stores each increment in non-volatile memory before it
// responds (Part 1, 37.3.2).
func counterTemplate() gotpm.TPMSNVPublic {
	return gotpm.TPMSNVPublic{
		NVIndex: CounterIndex, NameAlg: gotpm.TPMAlgSHA256, DataSize: 8,
		Attributes: gotpm.TPMANV{NT: gotpm.TPMNTCounter, AuthRead: true, AuthWrite: true, OwnerRead: true, NoDA: true},
	}
}

// Counter implements [Device].
func (t *TPM) Counter(ctx context.Context) (value uint64, err error) {
	err = t.sequence(ctx, "read counter", func(c *conn) error {
		value, err = c.counter()
		return err
	})
	return value, err
}

// IncrementCounter implements [Device].
func (t *TPM) IncrementCounter(ctx context.Context) (value uint64, err error) {
	err = t.sequence(ctx, "increment counter", func(c *conn) error {
		if _, err := c.counter(); err != nil {
			return err
		}
		value, err = c.increment()
		return err
	})
	return value, err
}

// DefineCounter implements [Device].
func (t *TPM) DefineCounter(ctx context.Context) (value uint64, err error) {
	err = t.sequence(ctx, "define counter", func(c *conn) error {
		owner := gotpm.AuthHandle{Handle: gotpm.TPMRHOwner, Auth: gotpm.PasswordAuth(nil)}
		if public, err := (gotpm.NVReadPublic{NVIndex: CounterIndex}).Execute(c.tpm); err == nil {
			undefine := gotpm.NVUndefineSpace{AuthHandle: owner, NVIndex: gotpm.NamedHandle{Handle: CounterIndex, Name: public.NVName}}
			if _, err := undefine.Execute(c.tpm); err != nil {
				return fmt.Errorf("undefine 0x%08x: %w", uint32(CounterIndex), err)
			}
		} else if !errors.Is(err, gotpm.TPMRCHandle) {
			return fmt.Errorf("read public area of 0x%08x: %w", uint32(CounterIndex), err)
		}
		if _, err := (gotpm.NVDefineSpace{AuthHandle: owner, PublicInfo: gotpm.New2B(counterTemplate())}).Execute(c.tpm); err != nil {
			return fmt.Errorf("define 0x%08x (the owner hierarchy's auth value must be empty): %w", uint32(CounterIndex), err)
		}
		value, err = c.increment()
		return err
	})
	return value, err
}

// counter reads the counter, after it has checked that the counter cannot be set back: its
// attributes, name algorithm and size must be those of the template (Part 3, 31.6,
// TPM2_NV_ReadPublic). An attacker with access to the TPM can define an ordinary index there, with
// any value.
func (c *conn) counter() (uint64, error) {
	public, err := gotpm.NVReadPublic{NVIndex: CounterIndex}.Execute(c.tpm)
	if errors.Is(err, gotpm.TPMRCHandle) {
		return 0, ErrNoCounter
	}
	if err != nil {
		return 0, fmt.Errorf("read public area: %w", err)
	}
	info, err := public.NVPublic.Contents()
	if err != nil {
		return 0, fmt.Errorf("decode public area: %w", err)
	}
	want := counterTemplate()
	if got := info.Attributes; got != want.Attributes {
		if want.Attributes.Written = true; got != want.Attributes {
			return 0, fmt.Errorf("%w: index 0x%08x has the attributes %+v", ErrForeignCounter, uint32(CounterIndex), got)
		}
	} else {
		return 0, ErrNoCounter // a crash between definition and first increment
	}
	if info.NameAlg != want.NameAlg || info.DataSize != want.DataSize || len(info.AuthPolicy.Buffer) > 0 {
		return 0, fmt.Errorf("%w: index 0x%08x holds %d bytes", ErrForeignCounter, uint32(CounterIndex), info.DataSize)
	}
	b, err := c.readNV(CounterIndex, 8)
	if err != nil {
		return 0, err
	}
	if len(b) != 8 {
		return 0, fmt.Errorf("%d bytes", len(b))
	}
	return binary.BigEndian.Uint64(b), nil
}

// increment adds one and reads the value (Part 3, 31.8, TPM2_NV_Increment). The first increment of
// a counter sets it to the largest value that any counter of this TPM has had, plus one (Part 1,
// 37.3.2), so a counter that was deleted and defined again is never lower.
func (c *conn) increment() (uint64, error) {
	public, err := gotpm.NVReadPublic{NVIndex: CounterIndex}.Execute(c.tpm)
	if err != nil {
		return 0, fmt.Errorf("read public area: %w", err)
	}
	_, err = gotpm.NVIncrement{
		AuthHandle: gotpm.AuthHandle{Handle: CounterIndex, Name: public.NVName, Auth: gotpm.PasswordAuth(nil)},
		NVIndex:    gotpm.NamedHandle{Handle: CounterIndex, Name: public.NVName},
	}.Execute(c.tpm)
	if err != nil {
		return 0, fmt.Errorf("increment: %w", err)
	}
	return c.counter()
}
